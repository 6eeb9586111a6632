"""Choose the documents for training and for evaluation, and count their rows."""

from dataclasses import dataclass

import numpy as np

from bench.contract.data import Data
from bench.errors import ConfigError
from jobs.data import packing

DECILES = tuple(i / 10 for i in range(11))


@dataclass(frozen=True, slots=True)
class Splits:
    """Masks over all documents [D]; a document in neither is skipped."""

    train: np.ndarray
    eval: np.ndarray


def choose(documents: np.ndarray, data: Data) -> Splits:
    """Return the documents of each split, from (length, prompt) [D, 2].

    With test_split, that share of the documents, sampled by the seed, is for evaluation. Otherwise the first documents,
    which fill eval_rows rows, are for evaluation, and the rest for training. No document is in both.
    """
    kept = packing.is_kept(documents, seq_length=data.seq_length, packing=data.packing, answer_only=data.answer_only)
    is_eval = np.zeros(len(documents), dtype=bool)
    where = np.flatnonzero(kept)
    if data.test_split is not None:
        shuffled = np.random.default_rng(data.seed).permutation(len(where))
        is_eval[where[shuffled[: round(len(where) * data.test_split)]]] = True
    else:
        sizes = documents[where, 0] if data.packing else np.full(len(where), data.seq_length)
        before = np.cumsum(sizes, dtype=np.int64) - sizes
        is_eval[where[before < data.eval_rows * data.seq_length]] = True
    return Splits(kept & ~is_eval, is_eval)


def num_rows(documents: np.ndarray, data: Data) -> int:
    """Return how many rows documents of (length, prompt) [D, 2] fill."""
    return int(documents[:, 0].sum(dtype=np.int64)) // data.seq_length if data.packing else len(documents)


def are_enough(data: Data, *, num_tokens: int, num_documents: int, longest: int) -> bool:
    """Return whether these documents fill all rows, so that the remaining files need not be read.

    Packed rows waste at most the end of one document. With answer_only, padded documents may be skipped, and with
    test_split the share depends on all documents; then all files are read, as for rows that are to be counted.
    """
    if data.test_split is not None or data.train_rows is None:
        return False
    rows = data.eval_rows + data.train_rows
    if data.packing:
        return num_tokens - longest >= rows * data.seq_length
    return not data.answer_only and num_documents >= rows


def require(available: dict[str, int], data: Data, where: str) -> None:
    """Raise ConfigError if the files have fewer rows than the config requires."""
    for name, needed in (("eval", data.eval_rows), ("train", data.train_rows or 1)):
        if available[name] < needed:
            rows = f"{available['train']:,} rows for training and {available['eval']:,} rows for evaluation"
            few = available["train"] < 1 or available["eval"] < 1
            fix = (
                "add files, or lower data.eval_rows, data.seq_length or data.test_split"
                if few
                else f"set data.{name}_rows to {available[name]} or less, or add files; finished blocks are kept"
            )
            raise ConfigError(
                f"data.{name}_rows is {needed:,}, but the files have only {rows}",
                where=where,
                fix=fix,
                rule="CFG-06",
            )


def described(documents: np.ndarray, chosen: Splits, data: Data) -> dict[str, object]:
    """Return the deciles of the lengths of documents (length, prompt) [D, 2], and how many were truncated."""
    is_long = documents[:, 0] > data.seq_length
    cut = 0 if data.packing else int((is_long & (chosen.train | chosen.eval)).sum())
    lengths = np.quantile(documents[:, 0], DECILES).round().astype(int).tolist() if len(documents) else []
    return {"documents": len(documents), "cut": cut, "lengths_by_decile": lengths}
