"""Read the records of a block; every error names the line, record or row that it is in."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract.data import DataSource
from bench.contract.data_files import FORMATS, check_record, columns_fix
from jobs.data.blocks import BOM, Block, parquet_file, refused

PARQUET_ROWS = 256
"""Rows that are read at a time."""
NOT_JSON = "write one JSON object on each line"
NOT_UTF_8 = "write the file again as UTF-8"


def read(block: Block, source: DataSource) -> Iterator[dict[str, str]]:
    """Yield a block's records, each with text in all of the source's columns.

    Raises:
        ConfigError: the file is damaged, or a record is not of the source's form.
    """
    columns, fix = FORMATS[source].columns, columns_fix(source)
    if block.form == "parquet":
        found = _parquet(block, columns, fix)
    else:
        found = {"lines": _lines, "gzip": _gzip_lines, "array": _array}[block.form](block)
    for place, record in found:
        if wrong := check_record(record, columns) or _broken_text(record, columns):
            raise refused(f"{place}: {wrong}", block.path, fix)
        yield record


def _broken_text(record: dict[str, str], columns: tuple[str, ...]) -> str | None:
    try:
        for name in columns:
            record[name].encode()
    except UnicodeEncodeError:
        return f"{name} holds half of a surrogate pair, which is no character"
    return None


def _parquet(block: Block, columns: tuple[str, ...], fix: str) -> Iterator[tuple[object, Any]]:
    with parquet_file(Path(block.path)) as file:
        there = file.schema_arrow.names
        if missing := [name for name in columns if name not in there]:
            raise refused(f"no column {', '.join(missing)}; there are {', '.join(there)}", block.path, fix)
        groups, number = list(range(block.start, block.stop)), block.first - 1
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, row_groups=groups, columns=list(columns)):
            for record in batch.to_pylist():
                number += 1
                yield f"row {number}", record


def _lines(block: Block) -> Iterator[tuple[object, Any]]:
    with open(block.path, "rb") as file:
        file.seek(max(0, block.start - 1))
        if block.start:
            file.readline()  # the end of a line that began before
        while (begins := file.tell()) < block.stop and (line := file.readline()):
            place = Line(block.path, begins)
            if not line.isspace():
                yield place, _parsed(line, place, block.path)


@dataclass(frozen=True, slots=True)
class Line:
    """The line that begins at an offset of a file; its number is counted when it is printed, as in errors."""

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
        what = f"the gzip is cut short or damaged behind line {number}: {error}"
        raise refused(what, block.path, "copy it again") from error


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
        held = json.loads(f"[{text.decode('utf-8')}]")
    except UnicodeDecodeError as error:
        what = f"byte {block.start + error.start + 1:,} of the file is not UTF-8 ({error.reason})"
        raise refused(what, block.path, NOT_UTF_8) from error
    except (ValueError, RecursionError) as error:
        raise refused(f"behind record {block.first}: not JSON: {error}", block.path, NOT_JSON) from error
    for number, record in enumerate(held, block.first):
        yield f"record {number}", record
