"""Published figures: files of conf/published, each a table of a document as it is printed and as it is meant.

    title: …                # what was measured
    place: …                # document, page, table
    hardware: …
    date: …
    signs: {"-": out of memory}                     # texts in place of a number; "*" may stand behind one
    columns: [{measurement: throughput_per_gpu, unit: tokens/s, gpus: 8, labels: {}}, …]
    rows: [{labels: {model: 7B}, printed: ["7488.3", …]}, …]

A row and a column say together what a cell is: the labels of both, the measurement and unit of the row if it has them,
else of the column. `gpus` says that so many GPUs reached the printed figures together: the value of a measurement per
GPU (`…_per_gpu`) is one's share.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml

from bench.errors import ConfigError

_NUMBER = re.compile(r"~?(\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*)(?:%|GB)?")
"""A number, with ~ for `about` before it or a unit behind it, or without."""
CALCULATED = "*"
"""Behind a number that the document calculated from a shorter run."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a file; a key that it does not know is an error."""


class Figure(_Part, frozen=True, kw_only=True):
    """One number of a document, or the sign in place of one."""

    labels: Mapping[str, str]
    """What sets it apart; a study puts it beside the arms that have these labels."""
    measurement: str
    """A name of `bench.results.Measurement`, or one that nothing here measures."""
    printed: str
    unit: str = ""
    """Of the value."""
    value: float | None = None
    """What is meant, per GPU where the measurement is; None for a sign in place of a number."""
    reason: str = ""
    """Why there is no value, or why it is not the printed number."""


class PublishedTable(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one table, and what they were measured on."""

    name: str
    """Of the file in conf/published."""
    title: str
    place: str
    """Document, page, table."""
    hardware: str
    date: str
    figures: tuple[Figure, ...]
    """In the order of the document: by rows."""


class _Cells(_Part, frozen=True, kw_only=True):
    labels: dict[str, str] = {}
    measurement: str = ""
    unit: str = ""


class _Column(_Cells, frozen=True, kw_only=True):
    gpus: int | None = None


class _Correction(_Part, frozen=True, kw_only=True):
    column: int
    """From 1."""
    value: float
    """In the unit of the cell, of all its GPUs."""
    reason: str


class _Row(_Cells, frozen=True, kw_only=True):
    printed: tuple[str, ...]
    corrected: tuple[_Correction, ...] = ()
    reason: str = ""
    """Why the labels are not the printed ones."""


class _File(_Part, frozen=True, kw_only=True):
    title: str
    place: str
    hardware: str
    date: str
    signs: dict[str, str] = {}
    columns: tuple[_Column, ...]
    rows: tuple[_Row, ...]


def read(path: Path) -> PublishedTable:
    """Return a file's figures.

    Raises:
        ConfigError: it cannot be read, has an unknown or missing key, or a cell that is no number and is not explained.
    """
    file = _parsed(path)
    rows = ((row, f"{path}: rows[{number}]") for number, row in enumerate(file.rows))
    return PublishedTable(
        name=path.stem,
        title=file.title,
        place=file.place,
        hardware=file.hardware,
        date=file.date,
        figures=tuple(figure for row, where in rows for figure in _of_row(file, row, where=where)),
    )


def number(printed: str) -> float | None:
    """Return the number in a cell: 49 for ~49GB, 58 for 58. and 1079.5 for 1,079.5; None where there is none."""
    found = _NUMBER.fullmatch(printed)
    return float(found[1].replace(",", "")) if found else None


def _parsed(path: Path) -> _File:
    try:
        raw = yaml.load(path.read_text("utf-8"), yaml.BaseLoader)  # noqa: S506  # every scalar is read as text
        return msgspec.convert(raw, _File, strict=False)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), fix="name a readable file") from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(what, where=str(path), fix="see the head of bench/results/published.py") from error


def _of_row(file: _File, row: _Row, *, where: str) -> list[Figure]:
    """Return the figures of a row, which has a cell for each column."""
    count = len(file.columns)
    if len(row.printed) != count:
        what = f"{len(row.printed)} cells, and the table has {count} columns"
        raise ConfigError(what, where=where, fix="give one text a column")
    if wrong := [one.column for one in row.corrected if not 1 <= one.column <= count]:
        raise ConfigError(f"column {wrong[0]} is corrected", where=where, fix=f"name a column from 1 to {count}")
    corrected = {one.column: one for one in row.corrected}
    cells = [
        _cell(row, column, printed, where=where) for column, printed in zip(file.columns, row.printed, strict=True)
    ]
    meant = [_meant(cell, file.signs, corrected.get(place), where=where) for place, cell in enumerate(cells, 1)]
    return [_per_gpu(figure, column.gpus) for figure, column in zip(meant, file.columns, strict=True)]


def _cell(row: _Row, column: _Column, printed: str, *, where: str) -> Figure:
    """Return what row and column say of a cell, without its value."""
    measurement, unit = row.measurement or column.measurement, row.unit or column.unit
    if not measurement:
        raise ConfigError("no measurement is named", where=where, fix="name one in the row or in each column")
    return Figure(
        labels=column.labels | row.labels, measurement=measurement, printed=printed, unit=unit, reason=row.reason
    )


def _meant(cell: Figure, signs: Mapping[str, str], corrected: _Correction | None, *, where: str) -> Figure:
    """Return the cell with the value that is meant, and with why that is not what is printed."""
    if cell.printed in signs:
        return msgspec.structs.replace(cell, reason=signs[cell.printed])
    digits = cell.printed.removesuffix(CALCULATED) if CALCULATED in signs else cell.printed
    value = corrected.value if corrected else number(digits)
    if value is None:
        raise ConfigError(
            f"{cell.printed!r} is not a number", where=where, fix="explain it in signs, or give its value in corrected"
        )
    reasons = (cell.reason, corrected.reason if corrected else "", signs[CALCULATED] if digits != cell.printed else "")
    return msgspec.structs.replace(cell, value=value, reason="; ".join(filter(None, reasons)))


def _per_gpu(figure: Figure, gpus: int | None) -> Figure:
    """Return one GPU's share, where the measurement is per GPU and the printed figure is of several."""
    if gpus is None or figure.value is None or not figure.measurement.endswith("_per_gpu"):
        return figure
    reason = "; ".join(filter(None, (figure.reason, f"of {gpus} GPUs together")))
    return msgspec.structs.replace(figure, value=figure.value / gpus, unit=f"{figure.unit}/GPU", reason=reason)
