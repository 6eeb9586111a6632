"""Cut files into blocks that processes read independently of each other.

JSON lines are cut by bytes: a line belongs to the block in which it begins. An array of JSON records is cut between
records, parquet between row groups. A .gz file cannot be read from its middle, so it is one block. The blocks depend on
the files alone, never on the number of processes.
"""

import mmap
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import ConfigError

BLOCK_BYTES = 4 * 2**20
BOM = b"\xef\xbb\xbf"
_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
"""A whole string, or a bracket outside of one."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes [start, stop) of a file or, of parquet, its row groups [start, stop)."""

    path: str
    form: str
    """lines, gzip, array or parquet."""
    start: int
    stop: int
    num_bytes: int
    """Of the file, for the progress."""
    first: int = 0
    """The number of its first record, for array and parquet."""


def cut(path: Path) -> Iterator[Block]:
    """Yield a file's blocks, in their order.

    Raises:
        ConfigError: the file is damaged where it must be read to be cut.
    """
    size = path.stat().st_size
    if path.suffix == ".parquet":
        yield from _cut_parquet(path, size)
    elif path.suffix == ".gz":
        yield Block(str(path), "gzip", 0, size, size)
    elif _is_array(path):
        yield from _cut_array(path)
    else:
        for start in range(0, size, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, size)
            yield Block(str(path), "lines", start, stop, stop - start)


def refused(what: str, path: str, fix: str) -> ConfigError:
    """Return the error of a file that is not as it should be."""
    return ConfigError(what, where=path, fix=fix, rule="CFG-06")


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Open a parquet file.

    Raises:
        ConfigError: it is damaged.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        what = f"the parquet is cut short or damaged: {str(error).splitlines()[0]}"
        raise refused(what, str(path), "copy it again") from error


def _cut_parquet(path: Path, size: int) -> Iterator[Block]:
    """Yield runs of row groups that hold about BLOCK_BYTES each, as they are stored."""
    with parquet_file(path) as file:
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        sizes, rows = [group.total_byte_size for group in groups], [group.num_rows for group in groups]
    stored = size / max(1, sum(sizes))  # the sizes are those before compression
    start = 0
    for stop in range(1, len(sizes) + 1):
        num_bytes = int(stored * sum(sizes[start:stop]))
        if num_bytes >= BLOCK_BYTES or stop == len(sizes):
            yield Block(str(path), "parquet", start, stop, num_bytes, sum(rows[:start]))
            start = stop


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2**16).removeprefix(BOM).lstrip()[:1] == b"["


def _cut_array(path: Path) -> Iterator[Block]:
    """Yield the blocks of an array of JSON objects, without parsing them.

    Raises:
        ConfigError: something else stands between them, or the end is missing.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end, number, first, start = 0, 0, 0, None
        for begins, ends in _objects(text):
            _require(text, end, begins, b"," if number else b"[", path, number)
            start = begins if start is None else start
            end, number = ends, number + 1
            if end - start >= BLOCK_BYTES:
                yield Block(str(path), "array", start, end, end - start, first)
                start, first = None, number
        if start is not None:
            yield Block(str(path), "array", start, end, end - start, first)
        _require(text, end, len(text), b"]" if number else b"[]", path, number)


def _objects(text: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield where the objects of an array begin and end."""
    depth, begins = 0, 0
    for mark in _MARKS.finditer(text):
        kind = text[mark.start()]
        if kind in b"{[":
            depth += 1
            if depth == 2:
                begins = mark.start()
        elif kind in b"}]":
            depth -= 1
            if depth == 1:
                yield begins, mark.end()


def _require(text: mmap.mmap, start: int, stop: int, want: bytes, path: Path, number: int) -> None:
    there = text[start : min(stop, start + 2**16)].removeprefix(BOM if start == 0 else b"")
    if b"".join(there.split()) != want:
        what = f"behind {number:,} records: {bytes(there[:40])!r} stands where {want.decode()} should"
        raise refused(what, str(path), "write one array of JSON objects, or one object on each line; copy it again")
