"""Split data files into blocks and read their records; every error names the line, record or row."""

import gzip
import json
import mmap
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.contract import codec, data_files
from bench.contract.data import Data
from bench.contract.data_files import columns_fix
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
    """lines, gzip, array, by_pmid or parquet."""
    start: int
    stop: int
    num_bytes: int
    """Size in the file, for the progress."""
    first: int = 0
    """The number of its first record, for array, by_pmid and parquet."""


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
    elif (head := _head(path)).lstrip()[:1] == b"[":
        yield from _cut_objects(path, "array")
    elif data_files.BY_PMID.match(head):
        yield from _cut_objects(path, "by_pmid")
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


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(2**16).removeprefix(BOM)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a file has around its records: how an error shows it, and its pattern, whose group is a record's key."""

    shown: str
    pattern: re.Pattern[bytes]


AROUND_BYTES = 2**16
"""How much of what is between two records is read."""
_FIRST, _NEXT, _LAST, _EMPTY = range(4)
_AROUND = {
    "array": (
        Mark("[", re.compile(rb"\s*\[\s*()")),
        Mark(",", re.compile(rb"\s*,\s*()")),
        Mark("]", re.compile(rb"\s*\]\s*")),
        Mark("[]", re.compile(rb"\s*\[\s*\]\s*")),
    ),
    "by_pmid": (
        Mark('{"PMID":', re.compile(rb'\s*\{\s*("\d+")\s*:\s*')),
        Mark(',"PMID":', re.compile(rb'\s*,\s*("\d+")\s*:\s*')),
        Mark("}", re.compile(rb"\s*\}\s*")),
        Mark("{}", re.compile(rb"\s*\{\s*\}\s*")),
    ),
}
"""By form: before the first record, before each other one, after the last one, and of a file without records."""
_MADE_OF = {
    "array": "write one array of JSON objects, or one object on each line; copy it again",
    "by_pmid": "write one object that has a record for each PMID, as PubMedQA's own files; copy it again",
}


def _cut_objects(path: Path, form: str) -> Iterator[Block]:
    """Yield the blocks of an array of JSON objects, or of an object of them, without parsing the objects.

    Raises:
        ConfigError: there is something else between the objects, or the end is missing.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        end, number, first, start = len(BOM) if text[: len(BOM)] == BOM else 0, 0, 0, None
        for begins, ends in _objects(text):
            key = _require(
                text[end : min(begins, end + AROUND_BYTES)], form, _NEXT if number else _FIRST, path, number
            ).start(1)
            start = end + key if start is None else start
            end, number = ends, number + 1
            if end - start >= BLOCK_BYTES:
                yield Block(str(path), form, start, end, end - start, first)
                start, first = None, number
        if start is not None:
            yield Block(str(path), form, start, end, end - start, first)
        _require(text[end : end + AROUND_BYTES], form, _LAST if number else _EMPTY, path, number)


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


def _require(actual: bytes, form: str, mark: int, path: Path, number: int) -> re.Match[bytes]:
    expected = _AROUND[form][mark]
    if (match := expected.pattern.fullmatch(actual)) is None:
        what = f"after {number:,} records the file has {b''.join(actual.split())[:40]!r} instead of {expected.shown}"
        raise refused(what, str(path), _MADE_OF[form])
    return match


PARQUET_ROWS = 256
"""Rows per read."""
NOT_JSON = "write one JSON object on each line"
NOT_UTF_8 = "write the file again as UTF-8"


T = TypeVar("T")


def read(block: Block, data: Data, convert: Callable[[Any], T]) -> Iterator[T]:
    """Yield a block's records, converted from the source's format (`data_files.read_record`).

    Raises:
        ConfigError: the file is damaged, a record does not have the source's format, or `convert` raised ValueError.
    """
    fix = columns_fix(data)
    if block.form == "parquet":
        located = _parquet(block, data, fix)
    else:
        located = {"lines": _lines, "gzip": _gzip_lines, "array": _array, "by_pmid": _by_pmid}[block.form](block)
    for place, raw in located:
        try:
            record = data_files.read_record(raw, data)
        except ValueError as error:
            raise refused(f"{place}: {error}", block.path, fix) from error
        try:
            yield convert(record)
        except ValueError as error:
            raise refused(f"{place}: {error}", block.path, f"correct or remove this record, or {fix}") from error


def _parquet(block: Block, data: Data, fix: str) -> Iterator[tuple[object, Any]]:
    with parquet_file(Path(block.path)) as file:
        try:
            columns = data_files.columns_in_file(file.schema_arrow.names, data)
        except ValueError as error:
            raise refused(str(error), block.path, fix) from error
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
    for number, record in enumerate(_whole(block, "[", "]", dict), block.first):
        yield f"record {number}", record


def _by_pmid(block: Block) -> Iterator[tuple[object, Any]]:
    for pmid, record in _whole(block, "{", "}", _distinct).items():
        yield f"record of PMID {pmid}", record


def _whole(
    block: Block, opening: str, closing: str, to_object: Callable[[list[tuple[str, Any]]], dict[str, Any]]
) -> Any:
    """Return the parsed block between these brackets; `to_object` takes the pairs of an object."""
    with open(block.path, "rb") as file:
        file.seek(block.start)
        text = file.read(block.stop - block.start)
    try:
        return json.loads(f"{opening}{text.decode('utf-8')}{closing}", object_pairs_hook=to_object)
    except UnicodeDecodeError as error:
        what = f"byte {block.start + error.start + 1:,} of the file is not UTF-8 ({error.reason})"
        raise refused(what, block.path, NOT_UTF_8) from error
    except (ValueError, RecursionError) as error:
        raise refused(f"the text after record {block.first} is not JSON: {error}", block.path, NOT_JSON) from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; raise ValueError for a name that it has twice, of which a dict would keep one."""
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError(f"the key {codec.repeated(pairs)!r:.80} occurs twice in the same object")
    return named
