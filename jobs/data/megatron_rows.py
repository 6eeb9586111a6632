"""Rows of tokens in the .bin and .idx files of Megatron-LM, in the order of megatron-core's GPTDataset.

GPTDataset shuffles the documents of all epochs, joins them to one stream, and cuts it into samples that overlap by one
token: sample i has the tokens from i * S to i * S + S, so that every token but the first is predicted once. Then it
shuffles the samples. A row here is one such sample of S + 1 tokens.

Source: megatron-core 0.16.1, megatron/core/datasets/gpt_dataset.py.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

from bench.contract import megatron_files
from bench.errors import ConfigError

_SEPARATE_LAST_EPOCH = 0.8
"""If the last epoch has less than this share of its samples, it is shuffled separately."""


class MegatronTokens:
    """The first rows of a data set, int32 [num_rows, S + 1]; indexing with row numbers [n] reads them from the files.

    seed: of GPTDataset's order; None: documents and samples are in the order of the files, which must have enough.

    Raises:
        ConfigError: the files are missing or damaged, have too few tokens, or one outside of the vocabulary.
    """

    def __init__(
        self, folder: Path, name: str, *, num_rows: int, seq_length: int, seed: int | None, vocab_size: int
    ) -> None:
        header = megatron_files.read(folder, name)
        self._index, self._bin = megatron_files.paths(folder, name)
        num, start = header.num_sequences, megatron_files.HEADER_BYTES
        lengths = np.memmap(self._index, np.dtype("<i4"), "r", start, num) if num else np.zeros(0, np.int32)
        self._begins = np.memmap(self._index, np.dtype("<i8"), "r", start + 4 * num, num) if num else lengths
        self._dtype = np.dtype(header.dtype).newbyteorder("<")
        self._vocab_size, self._seq_length = vocab_size, seq_length
        self.shape = (num_rows, seq_length + 1)
        num_epochs = _num_epochs(int(lengths.sum(dtype=np.int64)), num_rows, seq_length)
        if num_epochs is None or (seed is None and num_epochs > 1):
            what = f"the files have only {lengths.sum(dtype=np.int64):,} tokens, too few for {num_rows:,} rows"
            fix = f"copy or download {self._bin.name} again, or lower data.train_rows or data.eval_rows"
            raise ConfigError(what, where=str(self._bin), fix=fix, rule="CFG-06")
        if int(self._begins[-1]) // self._dtype.itemsize + int(lengths[-1]) > header.num_tokens:
            raise ConfigError(
                f"the file has only {header.num_tokens:,} tokens, but its index (.idx) lists more tokens",
                where=str(self._bin),
                fix=megatron_files.FIX,
                rule="CFG-06",
            )
        if seed is None:
            self._documents, self._samples = np.arange(num), np.arange(num_rows)
        else:
            self._documents, samples = _shuffled(lengths, num_rows, seq_length, num_epochs=num_epochs, seed=seed)
            self._samples = samples[:num_rows]
        self._ends = np.cumsum(lengths[self._documents], dtype=np.int64)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        with self._bin.open("rb", buffering=0) as file:  # a page fault of a memory map reads more than a document
            read = np.stack([self._sample(file.fileno(), int(sample)) for sample in self._samples[rows]])
        if read.size and not 0 <= read.min() <= read.max() < self._vocab_size:
            raise ConfigError(
                f"the files have tokens from {read.min()} to {read.max()}, but the vocabulary has "
                f"{self._vocab_size:,} entries",
                where=str(self._bin),
                fix="tokenize the data with the tokenizer of the model, or correct model.vocab_size",
                rule="CFG-06",
            )
        return read

    def _sample(self, file: int, sample: int) -> np.ndarray:
        """Return the tokens of one sample [S + 1]."""
        at = sample * self._seq_length
        end, place = at + self._seq_length + 1, int(np.searchsorted(self._ends, at, side="right"))
        parts = []
        while at < end:
            stop = min(end, int(self._ends[place]))
            document = self._documents[place]
            first = 0 if place == 0 else int(self._ends[place - 1])
            begin = int(self._begins[document]) + (at - first) * self._dtype.itemsize
            parts.append(np.frombuffer(os.pread(file, (stop - at) * self._dtype.itemsize, begin), self._dtype))
            at, place = stop, place + 1
        return np.concatenate(parts).astype(np.int32)

    @property
    def sha256(self) -> str:
        """The SHA-256 of the index and of the size of the tokens' file, which is too large to be read for it."""
        digest = hashlib.sha256(str(self._bin.stat().st_size).encode())
        with self._index.open("rb") as file:
            return hashlib.file_digest(file, lambda: digest).hexdigest()


def _num_epochs(tokens_per_epoch: int, num_rows: int, seq_length: int) -> int | None:
    """Return how many epochs the rows need; None if there are no tokens."""
    return -(-(num_rows * seq_length + 1) // tokens_per_epoch) if tokens_per_epoch else None


def _shuffled(
    lengths: np.ndarray, num_rows: int, seq_length: int, *, num_epochs: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents of all epochs, and all samples, in GPTDataset's order."""
    rng, per_epoch = np.random.RandomState(seed), int(lengths.sum(dtype=np.int64))
    total, before_last = ((num_epochs * per_epoch - 1) // seq_length, ((num_epochs - 1) * per_epoch - 1) // seq_length)
    is_separate = num_epochs > 1 and num_rows - before_last < int(
        _SEPARATE_LAST_EPOCH * ((per_epoch - 1) // seq_length)
    )
    documents, samples = [], []
    for epochs in (num_epochs - 1, 1) if is_separate else (num_epochs,):
        documents.append(np.tile(np.arange(len(lengths), dtype=np.int32), epochs))
        rng.shuffle(documents[-1])
    wide = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    for first, last in ((0, before_last), (before_last, total)) if is_separate else ((0, total),):
        samples.append(np.arange(first, last, dtype=wide))
        rng.shuffle(samples[-1])
    return np.concatenate(documents), np.concatenate(samples)
