"""Arrange tokenised documents in rows: packed one after another, or one per row with padding.

Packed: the documents of a split follow one another, each with its EOS, and every row is full; a document that does not
end in its row continues in the next one, and the rest after the last full row is dropped. Without data.document_mask
attention covers the whole row, including earlier documents, as in the pre-training of Megatron-LM and Llama. With it
the part of a document in a row is a document of its own: `Rows.starts` has the boundaries.

Padded: a document is truncated to seq_length, and padding fills the rest of its row. A document of which no token would
count, because its prompt fills the row, is skipped.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

CHUNK_TOKENS = 2**20
"""Documents are processed in chunks of about this many tokens, including padding."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents one after another: tokens [T], and for each of them its length and its prompt's [D]."""

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    counts: np.ndarray | None = None
    """Of conversations: the tokens of the assistant's turns [T]. None: all tokens behind the prompts."""

    def chosen(self, which: np.ndarray) -> "Documents":
        """Return the documents selected by a mask [D]."""
        if which.all():
            return self
        is_chosen = np.repeat(which, self.lengths)
        counts = None if self.counts is None else self.counts[is_chosen]
        return Documents(self.tokens[is_chosen], self.lengths[which], self.prompts[which], counts)

    def answers(self) -> np.ndarray:
        """Return the mask of tokens that are not in a prompt, or those of the assistant's turns [T]."""
        if self.counts is not None:
            return self.counts
        return self.positions() >= np.repeat(self.prompts, self.lengths)

    def positions(self) -> np.ndarray:
        """Return the position of each token in its document [T]."""
        starts = np.cumsum(self.lengths) - self.lengths
        places: np.ndarray = np.arange(len(self.tokens)) - np.repeat(starts, self.lengths)
        return places


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows as they are written: tokens and counts [R, S], and how many tokens of each row are real [R]."""

    tokens: np.ndarray
    counts: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray | None = None
    """Of packed rows: which tokens are the first one of a document in their row [R, S]."""


def chunks(
    tokens: np.ndarray, documents: np.ndarray, counts: np.ndarray | None = None, *, seq_length: int
) -> Iterator[Documents]:
    """Yield the documents of a block in chunks that need little memory; documents are (length, prompt) [D, 2]."""
    room = np.maximum(documents[:, 0], min(seq_length, CHUNK_TOKENS)).cumsum()
    starts, begin = np.concatenate([[0], documents[:, 0].cumsum()]), 0
    while begin < len(documents):
        used = room[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(room, used + CHUNK_TOKENS, side="right")))
        part = slice(starts[begin], starts[stop])
        lengths, prompts = np.asarray(documents[begin:stop], dtype=np.int64).T
        yield Documents(
            np.asarray(tokens[part]), lengths, prompts, None if counts is None else np.asarray(counts[part])
        )
        begin = stop


def is_kept(documents: np.ndarray, *, seq_length: int, packing: bool, answer_only: bool) -> np.ndarray:
    """Return the mask of documents (length, prompt) [D, 2] with at least one token that counts."""
    if packing or not answer_only:
        return np.ones(len(documents), dtype=bool)
    return documents[:, 1] < seq_length


def padded(documents: Documents, *, seq_length: int, answer_only: bool, pad: int) -> Rows:
    """Return one row for each document."""
    lengths = np.minimum(documents.lengths, seq_length)
    real = np.arange(seq_length) < lengths[:, None]
    tokens = np.full(real.shape, pad, dtype=np.int32)
    is_kept = documents.positions() < seq_length
    tokens[real] = documents.tokens[is_kept]
    counts = real.copy()
    if answer_only:
        counts[real] = documents.answers()[is_kept]
    return Rows(tokens, counts, lengths)


def packed(parts: Iterable[Documents], *, seq_length: int, answer_only: bool) -> Iterator[Rows]:
    """Yield the full rows of documents that arrive in parts."""
    tokens, counts, starts = np.empty(0, dtype=np.int32), np.empty(0, dtype=bool), np.empty(0, dtype=bool)
    for part in parts:
        tokens = np.concatenate([tokens, part.tokens])
        counts = np.concatenate([counts, part.answers() if answer_only else np.ones(len(part.tokens), dtype=bool)])
        starts = np.concatenate([starts, part.positions() == 0])
        full = len(tokens) // seq_length
        if full:
            stop = full * seq_length
            cut = (x[:stop].reshape(full, seq_length) for x in (tokens, counts, starts))
            tokens_RS, counts_RS, starts_RS = cut
            yield Rows(tokens_RS, counts_RS, np.full(full, seq_length), with_row_starts(starts_RS))
            tokens, counts, starts = tokens[stop:], counts[stop:], starts[stop:]


def with_row_starts(starts: np.ndarray) -> np.ndarray:
    """Return the starts of documents [R, S], plus the first token of each row: a document does not cross rows."""
    with_rows: np.ndarray = starts | (np.arange(starts.shape[1]) == 0)
    return with_rows
