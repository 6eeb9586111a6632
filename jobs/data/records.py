"""Split data files into blocks and read their records; every error names the line, record or row."""

import gzip
import json
import mmap
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract.data import DataSource
from bench.contract.data_files import FORMATS, check_record, columns_fix
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
    """Size in the file, for the progress."""
    first: int = 0
    """The number of its first record, for array and parquet."""


def cut(path: Path) -> Iterator[Block]:
    """Yield the blocks of a file in order.

    Raises:
        ConfigError: the file is damaged.
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
    """Return the error of an invalid file."""
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
        what = f"the parquet file is truncated or damaged: {str(error).splitlines()[0]}"
        raise refused(what, str(path), "copy the file again") from error


def _cut_parquet(path: Path, size: int) -> Iterator[Block]:
    """Yield ranges of row groups with about BLOCK_BYTES each on disk."""
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
    """Yield the blocks of an array of JSON objects, without parsing the objects.

    Raises:
        ConfigError: there is something else between the objects, or the end is missing.
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


def _require(text: mmap.mmap, start: int, stop: int, expected: bytes, path: Path, number: int) -> None:
    actual = text[start : min(stop, start + 2**16)].removeprefix(BOM if start == 0 else b"")
    if b"".join(actual.split()) != expected:
        what = f"after {number:,} records the file has {bytes(actual[:40])!r} instead of {expected.decode()}"
        raise refused(
            what,
            str(path),
            "write one array of JSON objects, or one object on each line; if the file is cut off, copy the file again",
        )


PARQUET_ROWS = 256
"""Rows per read."""
NOT_JSON = "write one JSON object on each line"
NOT_UTF_8 = "write the file again as UTF-8"


def read(block: Block, source: DataSource) -> Iterator[dict[str, str]]:
    """Yield a block's records, each with text in all columns of the source.

    Raises:
        ConfigError: the file is damaged, or a record does not have the source's format.
    """
    columns, fix = FORMATS[source].columns, columns_fix(source)
    if block.form == "parquet":
        located = _parquet(block, columns, fix)
    else:
        located = {"lines": _lines, "gzip": _gzip_lines, "array": _array}[block.form](block)
    for place, record in located:
        if wrong := check_record(record, columns) or _broken_text(record, columns):
            raise refused(f"{place}: {wrong}", block.path, fix)
        yield record


def _broken_text(record: dict[str, str], columns: tuple[str, ...]) -> str | None:
    try:
        for name in columns:
            record[name].encode()
    except UnicodeEncodeError:
        return f"{name} contains an unpaired surrogate, which is not a valid character"
    return None


def _parquet(block: Block, columns: tuple[str, ...], fix: str) -> Iterator[tuple[object, Any]]:
    with parquet_file(Path(block.path)) as file:
        names = file.schema_arrow.names
        if missing := [name for name in columns if name not in names]:
            raise refused(
                f"column {', '.join(missing)} is missing; the columns are {', '.join(names)}", block.path, fix
            )
        groups, number = list(range(block.start, block.stop)), block.first - 1
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, row_groups=groups, columns=list(columns)):
            for record in batch.to_pylist():
                number += 1
                yield f"row {number}", record


def _lines(block: Block) -> Iterator[tuple[object, Any]]:
    with open(block.path, "rb") as file:
        file.seek(max(0, block.start - 1))
        if block.start:
            file.readline()  # the rest of a line that belongs to the block before
        while (begins := file.tell()) < block.stop and (line := file.readline()):
            place = Line(block.path, begins)
            if not line.isspace():
                yield place, _parsed(line, place, block.path)


@dataclass(frozen=True, slots=True)
class Line:
    """A line by its offset in a file; the line number is counted when it is printed."""

    path: str
    begins: int

    def __str__(self) -> str:
        left, number = self.begins, 1
        with open(self.path, "rb") as file:
            while left > 0 and (part := file.read(min(left, 2**20))):
                left, number = left - len(part), number + part.count(b"\n")
        return f"line {number}"


def _gzip_lines(block: Block) -> Iterator[tuple[object, Any]]:
    number = 0
    try:
        with gzip.open(block.path) as file:
            for line in file:
                number += 1
                if not line.isspace():
                    yield f"line {number}", _parsed(line, f"line {number}", block.path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = f"the gzip file is truncated or damaged after line {number}: {error}"
        raise refused(what, block.path, "copy the file again") from error


def _parsed(line: bytes, place: object, path: str) -> Any:
    try:
        return json.loads(line.removeprefix(BOM).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise refused(f"{place}: byte {error.start + 1} is not UTF-8 ({error.reason})", path, NOT_UTF_8) from error
    except (ValueError, RecursionError) as error:
        raise refused(f"{place} is not JSON: {error}", path, NOT_JSON) from error


def _array(block: Block) -> Iterator[tuple[object, Any]]:
    with open(block.path, "rb") as file:
        file.seek(block.start)
        text = file.read(block.stop - block.start)
    try:
        parsed = json.loads(f"[{text.decode('utf-8')}]")
    except UnicodeDecodeError as error:
        what = f"byte {block.start + error.start + 1:,} of the file is not UTF-8 ({error.reason})"
        raise refused(what, block.path, NOT_UTF_8) from error
    except (ValueError, RecursionError) as error:
        raise refused(f"the text after record {block.first} is not JSON: {error}", block.path, NOT_JSON) from error
    for number, record in enumerate(parsed, block.first):
        yield f"record {number}", record
