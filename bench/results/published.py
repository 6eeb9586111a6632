"""Read published figures: files in conf/published, each a table of a document with printed and corrected values.

    title: …                # what was measured
    place: …                # document, page, table
    hardware: …
    date: …
    platform: {name: A800, gpu: A800}               # optional: the platform, to compare it with clusters of this GPU
    signs: {"-": out of memory}                     # what each symbol means; "*" follows a number, others replace it
    columns: [{measurement: throughput_per_gpu, unit: tokens/s, gpus: 8, labels: {}}, …]
    rows: [{labels: {model: 7B}, printed: ["7488.3", …]}, …]
    figures: [{labels: {model: 70B}, measurement: step_time, unit: ms, printed_in: s, printed: "375"}]
    not_measured: why no arm measures these figures, and what was tried; also in a row, a column or a figure

A table has rows and columns; figures are single numbers, such as those in a text. A cell has the labels of its row and
of its column, and the measurement and unit of the row if it has them, else of the column. `gpus` is the number of GPUs
for which a figure is printed in total: for a measurement per GPU (`…_per_gpu`), the value is divided by it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import yaml

from bench.errors import ConfigError

_NUMBER = re.compile(r"~?(\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*)(?:%|GB)?")
"""A number, optionally with ~ (about) before it, or a unit after it."""
FACTORS = {("s", "ms"): 1000, ("ms", "us"): 1000, ("%", ""): 0.01}
"""Factors from the unit of the document to the unit of the value."""
CALCULATED = "*"
"""Follows a number that the document calculated from a shorter run."""


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file; unknown keys are errors."""


class Figure(_Part, frozen=True, kw_only=True):
    """One number of a document, or the sign in place of it."""

    labels: Mapping[str, str]
    """A study shows it next to the arms with these labels."""
    measurement: str
    """A name of `bench.results.Measurement`, or one that runstop does not measure."""
    printed: str
    unit: str = ""
    """Of the value."""
    value: float | None = None
    """The correct value, per GPU for a measurement per GPU; None for a sign in place of a number."""
    reason: str = ""
    """Why there is no value, or why it differs from the printed number (other than by the unit)."""
    not_measured: str = ""
    """Why no arm measures it, and what was tried."""


class PublishedPlatform(_Part, frozen=True, kw_only=True):
    """The platform of a published table, which a study shows next to a cluster with the same platform."""

    name: str
    gpu: str
    """A part of the GPU's name in conf/gpu, such as RTX 3090."""
    environment: dict[str, str] = {}
    """Variables of NCCL that distinguish platforms with the same GPU, such as NCCL_P2P_DISABLE."""


class PublishedTable(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one table, and their hardware."""

    name: str
    """The name of the file in conf/published."""
    title: str
    """With the printed units appended, if the values have others."""
    place: str
    """Document, page, table."""
    hardware: str
    date: str
    figures: tuple[Figure, ...]
    """In the order of the document, by rows."""
    platform: PublishedPlatform | None = None


class _Given(_Part, frozen=True, kw_only=True):
    """The properties that a row, a column or a figure gives its cells."""

    labels: dict[str, str] = {}
    measurement: str = ""
    unit: str = ""
    printed_in: str = ""
    """The unit in the document, if it differs."""
    gpus: int | None = None
    reason: str = ""
    """Why the labels or `value` differ from the printed ones."""
    not_measured: str = ""


class _Cell(_Given, frozen=True, kw_only=True):
    printed: str
    value: float | None = None
    """The corrected number."""


class _Correction(_Part, frozen=True, kw_only=True):
    column: int
    """From 1."""
    value: float
    """The corrected number."""
    reason: str


class _Row(_Given, frozen=True, kw_only=True):
    printed: tuple[str, ...]
    corrected: tuple[_Correction, ...] = ()


class _File(_Part, frozen=True, kw_only=True):
    title: str
    place: str
    hardware: str
    date: str
    platform: PublishedPlatform | None = None
    unit: str = ""
    """The unit of cells without one."""
    signs: dict[str, str] = {}
    columns: tuple[_Given, ...] = ()
    rows: tuple[_Row, ...] = ()
    figures: tuple[_Cell, ...] = ()
    not_measured: str = ""


def read(path: Path) -> PublishedTable:
    """Return a file's figures.

    Raises:
        ConfigError: it cannot be read, has an unknown or missing key, or a cell that is neither number nor sign.
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
        platform=file.platform,
        figures=tuple(_figure(cell, file, where=where) for cell, where in cells),
    )


def number(printed: str) -> float | None:
    """Return the number in a cell: 49 for ~49GB, 58 for 58. and 1079.5 for 1,079.5; None if it is not a number."""
    match = _NUMBER.fullmatch(printed)
    return float(match[1].replace(",", "")) if match else None


def _parsed(path: Path) -> _File:
    try:
        raw = yaml.load(path.read_text("utf-8"), Loader=yaml.CBaseLoader)  # noqa: S506  # every scalar is read as text
        return msgspec.convert(raw, _File, strict=False)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be read: {error.strerror}", where=str(path), fix="give a file that this user can read"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        what = " ".join(str(error).split())
        raise ConfigError(
            what, where=str(path), fix="write the file as the docstring of bench/results/published.py describes"
        ) from error


def _of_row(row: _Row, columns: Sequence[_Given], *, where: str) -> list[_Cell]:
    """Return the cells of a row, one for each column."""
    if len(row.printed) != len(columns):
        what = f"the row has {len(row.printed)} cells, but the table has {len(columns)} columns"
        raise ConfigError(
            what, where=where, fix="give the key `printed` of this row one cell for each column of the table"
        )
    if wrong := [one.column for one in row.corrected if not 1 <= one.column <= len(columns)]:
        fix = f"set `column` in `corrected` to a number from 1 to {len(columns)}"
        raise ConfigError(
            f"the key `corrected` names column {wrong[0]}, but the table has only {len(columns)} columns",
            where=where,
            fix=fix,
        )
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
        not_measured=row.not_measured or column.not_measured,
        printed=printed,
        value=corrected.value if corrected else None,
    )


def _figure(cell: _Cell, file: _File, *, where: str) -> Figure:
    """Return a cell with the correct value, and why it differs from the printed one."""
    if not cell.measurement:
        raise ConfigError(
            "the key `measurement` is missing, so runstop does not know what was measured",
            where=where,
            fix="set `measurement`, such as step_time, in the row of this value or in every column",
        )
    if cell.value is not None and not cell.reason:
        what = f"the value {cell.value:g} replaces the printed number {cell.printed!r}, but no reason is given"
        raise ConfigError(what, where=where, fix="add `reason`, or remove `value` to use the printed number")
    unit = cell.unit or file.unit
    figure = Figure(
        labels=cell.labels,
        measurement=cell.measurement,
        printed=cell.printed,
        unit=unit,
        not_measured=cell.not_measured or file.not_measured,
    )
    if cell.printed in file.signs:
        return msgspec.structs.replace(figure, reason=file.signs[cell.printed])
    is_calculated = CALCULATED in file.signs and cell.printed.endswith(CALCULATED)
    value = cell.value if cell.value is not None else number(cell.printed.rstrip(CALCULATED if is_calculated else ""))
    if value is None:
        fix = f"add {cell.printed!r} to the key `signs` of this file, or add `value` and `reason` to this cell"
        raise ConfigError(f"this cell has the text {cell.printed!r}, which is not a number", where=where, fix=fix)
    reason = _joined(cell.reason, file.signs[CALCULATED] if is_calculated else "")
    return _converted(msgspec.structs.replace(figure, value=value, reason=reason), cell, where=where)


def _converted(figure: Figure, cell: _Cell, *, where: str) -> Figure:
    """Return a figure in its own unit, divided by the number of GPUs for a measurement per GPU."""
    value, unit = figure.value or 0.0, figure.unit
    if cell.printed_in:
        if (cell.printed_in, unit) not in FACTORS:
            known = "; ".join(f"printed_in {theirs!r} and unit {ours!r}" for theirs, ours in FACTORS)
            what = f"the printed unit {cell.printed_in!r} cannot be converted to the unit {unit!r}"
            raise ConfigError(what, where=where, fix=f"set one of these pairs: {known}")
        value *= FACTORS[cell.printed_in, unit]
    if cell.gpus is not None and figure.measurement.endswith("_per_gpu"):
        value, unit = value / cell.gpus, f"{unit}/GPU"
    return msgspec.structs.replace(figure, value=value, unit=unit)


def _printed(cells: Sequence[_Cell]) -> str:
    """Return the end of the title if printed numbers are totals over GPUs or have other units."""
    gpus = sorted({cell.gpus for cell in cells if cell.gpus is not None and cell.measurement.endswith("_per_gpu")})
    units = dict.fromkeys(cell.printed_in for cell in cells if cell.printed_in)
    totals = [f"as totals of {', '.join(map(str, gpus))} GPUs"] if gpus else []
    texts = [*totals, *([f"in {' and '.join(units)}"] if units else [])]
    return f" (printed {' and '.join(texts)})" if texts else ""


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))
