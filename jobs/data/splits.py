"""Which documents are for training and which for evaluation, and how many rows they come to."""

from dataclasses import dataclass

import numpy as np

from bench.contract.data import Data
from bench.errors import ConfigError
from jobs.data import packing

DECILES = tuple(i / 10 for i in range(11))


@dataclass(frozen=True, slots=True)
class Splits:
    """Masks over all documents [D]; a document in neither is left out."""

    train: np.ndarray
    eval: np.ndarray


def choose(documents: np.ndarray, data: Data) -> Splits:
    """Return the documents of each split, from (length, prompt) [D, 2].

    With test_split that share of the documents, drawn by the seed, is for evaluation. Without it evaluation takes the
    first ones, as many as fill eval_rows rows, and training those behind them: no document is in both.
    """
    kept = packing.is_kept(documents, seq_length=data.seq_length, packing=data.packing, answer_only=data.answer_only)
    is_eval = np.zeros(len(documents), dtype=bool)
    where = np.flatnonzero(kept)
    if data.test_split is not None:
        drawn = np.random.default_rng(data.seed).permutation(len(where))
        is_eval[where[drawn[: round(len(where) * data.test_split)]]] = True
    else:
        sizes = documents[where, 0] if data.packing else np.full(len(where), data.seq_length)
        before = np.cumsum(sizes, dtype=np.int64) - sizes
        is_eval[where[before < data.eval_rows * data.seq_length]] = True
    return Splits(kept & ~is_eval, is_eval)


def num_rows(documents: np.ndarray, data: Data) -> int:
    """Return how many rows documents of (length, prompt) [D, 2] fill."""
    return int(documents[:, 0].sum(dtype=np.int64)) // data.seq_length if data.packing else len(documents)


def are_enough(data: Data, *, num_tokens: int, num_documents: int, longest: int) -> bool:
    """Return whether so many documents fill all rows, so that the rest of the files need not be read.

    Packed, evaluation wastes at most the end of one document. Padded, some documents may be left out, which is known
    only when all of them are; then everything is read, as it is with test_split.
    """
    rows = data.eval_rows + data.train_rows
    if data.test_split is not None:
        return False
    if data.packing:
        return num_tokens - longest >= rows * data.seq_length
    return not data.answer_only and num_documents >= rows


def require(there: dict[str, int], data: Data, where: str) -> None:
    """Raise ConfigError when the files hold fewer rows than the config says."""
    for name, want in (("eval", data.eval_rows), ("train", data.train_rows)):
        if there[name] < want:
            held = f"{there['train']:,} to train on, {there['eval']:,} to evaluate"
            few = there["train"] < 1 or there["eval"] < 1
            fix = (
                "bring more files, or a smaller data.eval_rows, data.seq_length or data.test_split"
                if few
                else f"set data.{name}_rows={there[name]} or fewer, or bring more files; what is tokenised is kept"
            )
            raise ConfigError(
                f"data.{name}_rows is {want:,}, and the files hold {there[name]:,} rows ({held})",
                where=where,
                fix=fix,
                rule="CFG-06",
            )


def described(documents: np.ndarray, chosen: Splits, data: Data) -> dict[str, object]:
    """Return how long documents of (length, prompt) [D, 2] are, and how many of those in rows are cut."""
    is_long = documents[:, 0] > data.seq_length
    cut = 0 if data.packing else int((is_long & (chosen.train | chosen.eval)).sum())
    lengths = np.quantile(documents[:, 0], DECILES).round().astype(int).tolist() if len(documents) else []
    return {"documents": len(documents), "cut": cut, "lengths_by_decile": lengths}
