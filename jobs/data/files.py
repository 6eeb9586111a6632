"""The files of a split of rows, written as rows come, and what a manifest says of a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bench.contract import file_content
from jobs.data.layout import Rows

DTYPES = {"tokens": "<i4", "counts": "|b1", "lengths": "<i4"}
COUNTED = ("rows", "tokens", "real_tokens", "counted_tokens")
"""What a manifest says of a split: its rows, their tokens, those that are not padding, and those of the loss."""


@dataclass(slots=True)
class RowFiles:
    """NAME_tokens.npy, NAME_counts.npy and NAME_lengths.npy of one split, and how much has been written to them."""

    files: dict[str, BinaryIO]
    num_rows: int
    """Of the headers."""
    written: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    def write(self, rows: Rows) -> None:
        """Append rows, and leave out those that the headers have no room for."""
        room = self.num_rows - self.written["rows"]
        tokens, counts, lengths = rows.tokens[:room], rows.counts[:room], rows.lengths[:room]
        for name, array in (("tokens", tokens), ("counts", counts), ("lengths", lengths)):
            self.files[name].write(array.astype(DTYPES[name]).tobytes())
        sums = {"tokens": tokens.size, "real_tokens": int(lengths.sum()), "counted_tokens": int(counts.sum())}
        for name, more in ({"rows": len(tokens)} | sums).items():
            self.written[name] += more

    @property
    def is_full(self) -> bool:
        return self.written["rows"] == self.num_rows


@contextmanager
def opened(folder: Path, name: str, *, num_rows: int, seq_length: int) -> Iterator[RowFiles]:
    """Yield the files of a split, with the headers of so many rows."""
    files: dict[str, BinaryIO] = {}
    try:
        for part, descr in DTYPES.items():
            shape = (num_rows,) if part == "lengths" else (num_rows, seq_length)
            files[part] = (folder / f"{name}_{part}.npy").open("wb")
            np.lib.format.write_array_header_1_0(files[part], {"descr": descr, "fortran_order": False, "shape": shape})
        yield RowFiles(files, num_rows)
    finally:
        for file in files.values():
            file.close()


def described(path: Path) -> dict[str, Any]:
    """Return a file's name, size and sha256, as a manifest lists them."""
    content = file_content.of(path)
    return {"path": path.name, "bytes": content.bytes, "sha256": content.sha256}
