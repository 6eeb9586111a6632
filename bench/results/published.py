"""Published figures: files of conf/published, each a table of a document as it is printed and as it is meant.

    title: …                # what was measured
    place: …                # document, page, table
    hardware: …
    date: …
    signs: {"-": out of memory}                     # texts in place of a number; "*" may stand behind one
    columns: [{measurement: throughput_per_gpu, unit: tokens/s, gpus: 8, labels: {}}, …]
    rows: [{labels: {model: 7B}, printed: ["7488.3", …]}, …]
    figures: [{labels: {model: 70B}, measurement: step_time, unit: ms, printed_in: s, printed: "375"}]

A table has rows and columns; figures stand alone, as those in a text. Row and column say together what a cell is: the
labels of both, the measurement and unit of the row if it has them, else of the column. `gpus` says that so many GPUs
reached the printed figures together: the value of a measurement per GPU (`…_per_gpu`) is one's share.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from bench.errors import ConfigError

_NUMBER = re.compile(r"~?(\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*)(?:%|GB)?")
"""A number, with ~ for `about` before it or a unit behind it, or without."""
FACTORS = {("s", "ms"): 1000, ("ms", "us"): 1000, ("%", ""): 0.01}
"""From a document's unit to the unit of the value."""
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
    """Why there is no value, or why it is not the printed number, beyond its unit."""


class PublishedTable(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one table, and what they were measured on."""

    name: str
    """Of the file in conf/published."""
    title: str
    """It ends with the units of the print, where values have others."""
    place: str
    """Document, page, table."""
    hardware: str
    date: str
    figures: tuple[Figure, ...]
    """In the order of the document: by rows."""


class _Given(_Part, frozen=True, kw_only=True):
    """What a row, a column or a figure says of its cells."""

    labels: dict[str, str] = {}
    measurement: str = ""
    unit: str = ""
    printed_in: str = ""
    """The document's unit, where it is another one."""
    gpus: int | None = None
    reason: str = ""
    """Why the labels are not the printed ones, or `value` is not the printed number."""


class _Cell(_Given, frozen=True, kw_only=True):
    printed: str
    value: float | None = None
    """As the printed one should be."""


class _Correction(_Part, frozen=True, kw_only=True):
    column: int
    """From 1."""
    value: float
    """As the printed one should be."""
    reason: str


class _Row(_Given, frozen=True, kw_only=True):
    printed: tuple[str, ...]
    corrected: tuple[_Correction, ...] = ()


class _File(_Part, frozen=True, kw_only=True):
    title: str
    place: str
    hardware: str
    date: str
    unit: str = ""
    """Of cells that name none."""
    signs: dict[str, str] = {}
    columns: tuple[_Given, ...] = ()
    rows: tuple[_Row, ...] = ()
    figures: tuple[_Cell, ...] = ()


def read(path: Path) -> PublishedTable:
    """Return a file's figures.

    Raises:
        ConfigError: it cannot be read, has an unknown or missing key, or a cell that is no number and is not explained.
    """
    file = _parsed(path)
    cells = [(cell, f"{path}: figures[{number}]") for number, cell in enumerate(file.figures)]
    for number, row in enumerate(file.rows):
        where = f"{path}: rows[{number}]"
        cells += [(cell, where) for cell in _of_row(row, file.columns, where=where)]
    return PublishedTable(
        name=path.stem,
        title=file.title + _printed([cell for cell, _ in cells]),
        place=file.place,
        hardware=file.hardware,
        date=file.date,
        figures=tuple(_figure(cell, file, where=where) for cell, where in cells),
    )


def number(printed: str) -> float | None:
    """Return the number in a cell: 49 for ~49GB, 58 for 58. and 1079.5 for 1,079.5; None where there is none."""
    found = _NUMBER.fullmatch(printed)
    return float(found[1].replace(",", "")) if found else None


def _parsed(path: Path) -> _File:
    try:
        raw = yaml.load(path.read_text("utf-8"), Loader=yaml.CBaseLoader)  # noqa: S506  # every scalar is read as text
        return msgspec.convert(raw, _File, strict=False)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), fix="name a readable file") from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(what, where=str(path), fix="see the head of bench/results/published.py") from error


def _of_row(row: _Row, columns: Sequence[_Given], *, where: str) -> list[_Cell]:
    """Return the cells of a row, one for each column."""
    if len(row.printed) != len(columns):
        what = f"{len(row.printed)} cells, and the table has {len(columns)} columns"
        raise ConfigError(what, where=where, fix="give one text a column")
    if wrong := [one.column for one in row.corrected if not 1 <= one.column <= len(columns)]:
        fix = f"name a column from 1 to {len(columns)}"
        raise ConfigError(f"column {wrong[0]} is corrected", where=where, fix=fix)
    corrected = {one.column: one for one in row.corrected}
    return [
        _cell(row, column, printed, corrected.get(place))
        for place, (column, printed) in enumerate(zip(columns, row.printed, strict=True), 1)
    ]


def _cell(row: _Row, column: _Given, printed: str, corrected: _Correction | None) -> _Cell:
    return _Cell(
        labels=column.labels | row.labels,
        measurement=row.measurement or column.measurement,
        unit=row.unit or column.unit,
        printed_in=row.printed_in or column.printed_in,
        gpus=row.gpus or column.gpus,
        reason=_joined(row.reason, corrected.reason if corrected else ""),
        printed=printed,
        value=corrected.value if corrected else None,
    )


def _figure(cell: _Cell, file: _File, *, where: str) -> Figure:
    """Return a cell with the value that is meant, and why that is not what is printed."""
    if not cell.measurement:
        raise ConfigError("no measurement is named", where=where, fix="name one in the row or in each column")
    if cell.value is not None and not cell.reason:
        what = f"the value {cell.value:g} is given for {cell.printed!r}, and no reason"
        raise ConfigError(what, where=where, fix="say why, or leave value out where the printed number is meant")
    unit = cell.unit or file.unit
    made = Figure(labels=cell.labels, measurement=cell.measurement, printed=cell.printed, unit=unit)
    if cell.printed in file.signs:
        return msgspec.structs.replace(made, reason=file.signs[cell.printed])
    is_calculated = CALCULATED in file.signs and cell.printed.endswith(CALCULATED)
    value = cell.value if cell.value is not None else number(cell.printed.rstrip(CALCULATED if is_calculated else ""))
    if value is None:
        fix = "explain it in signs, or give its value and the reason"
        raise ConfigError(f"{cell.printed!r} is not a number", where=where, fix=fix)
    reason = _joined(cell.reason, file.signs[CALCULATED] if is_calculated else "")
    return _converted(msgspec.structs.replace(made, value=value, reason=reason), cell, where=where)


def _converted(figure: Figure, cell: _Cell, *, where: str) -> Figure:
    """Return a figure in its own unit, and one GPU's share where the measurement is per GPU."""
    value, unit = figure.value or 0.0, figure.unit
    if cell.printed_in:
        if (cell.printed_in, unit) not in FACTORS:
            known = ", ".join(f"{ours or 'a share'} printed in {theirs}" for theirs, ours in FACTORS)
            what = f"no way from {cell.printed_in!r} to {unit!r}"
            raise ConfigError(what, where=where, fix=f"there are {known}")
        value *= FACTORS[cell.printed_in, unit]
    if cell.gpus is not None and figure.measurement.endswith("_per_gpu"):
        value, unit = value / cell.gpus, f"{unit}/GPU"
    return msgspec.structs.replace(figure, value=value, unit=unit)


def _printed(cells: Sequence[_Cell]) -> str:
    """Return how the print differs from the values in all of its cells, for the title: GPUs together, other units."""
    gpus = sorted({cell.gpus for cell in cells if cell.gpus is not None and cell.measurement.endswith("_per_gpu")})
    units = dict.fromkeys(cell.printed_in for cell in cells if cell.printed_in)
    together = [f"for {', '.join(map(str, gpus))} GPUs together"] if gpus else []
    said = [*together, *([f"in {' and '.join(units)}"] if units else [])]
    return f" (printed {', and '.join(said)})" if said else ""


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))
