"""How much attention a document mask leaves: by the lengths of the documents in packed rows.

A document of l tokens has l - d pairs of a query and a key d tokens earlier. Packing cuts documents at the ends of rows
of S tokens. A document begins at any place of a row with the same probability, so a pair at distance d is in one row
with the probability 1 - d / S. A document thus has the sum over d < min(l, S) of (l - d) (1 - d / S) pairs. A full row
has S (S + 1) / 2.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.contract import atomic_files, checksums
from bench.contract.plan_paths import expanded
from bench.contract.schema import Config, DataSource
from bench.planning.data_folder import data_dir

_POINTS = 20
"""Lengths between two deciles, which are assumed to be spread evenly."""


def attention_share(config: Config) -> float | None:
    """Return the attention operations of a row with a document mask, relative to a row without.

    None without a document mask, or if the lengths of the documents are not known.
    """
    if not config.training_data.document_mask:
        return None
    known = lengths(config)
    return None if known is None else share(known, seq_length=config.training_data.seq_length)


def lengths(config: Config) -> list[float] | None:
    """Return typical lengths of documents: data.lengths of random rows, or from the deciles of rows that are prepared.

    None if neither is known on this machine.
    """
    data = config.training_data
    if data.source is DataSource.random:
        return None if data.lengths is None else [float(length) for length in data.lengths]
    folder = expanded(data_dir(config))
    if folder is None:
        return None
    records = atomic_files.read_object(Path(folder) / checksums.MANIFEST).get("records")
    match records:
        case {"lengths_by_decile": [*deciles]} if len(deciles) > 1 and all(type(x) is int for x in deciles):
            return _between(deciles)
    return None


def share(lengths: Sequence[float], *, seq_length: int) -> float:
    """Return the pairs of documents with these lengths (tokens), relative to rows of one document; at most 1."""
    pairs = sum(_pairs(max(1.0, length), seq_length) for length in lengths)
    mean_keys = pairs / sum(max(1.0, length) for length in lengths)
    return min(1.0, mean_keys / ((seq_length + 1) / 2))


def _between(deciles: Sequence[int]) -> list[float]:
    """Return lengths that are spread evenly between each two deciles."""
    steps = [(i + 0.5) / _POINTS for i in range(_POINTS)]
    return [low + step * (high - low) for low, high in zip(deciles, deciles[1:], strict=False) for step in steps]


def _pairs(length: float, seq_length: int) -> float:
    """Return the expected pairs of a document: the sum over d < n of (l - d) (1 - d / S), n = min(l, S)."""
    n = min(length, seq_length)
    sum_d, sum_d2 = n * (n - 1) / 2, (n - 1) * n * (2 * n - 1) / 6
    return n * length - sum_d - length * sum_d / seq_length + sum_d2 / seq_length
