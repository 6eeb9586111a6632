"""Lay out a study's tables for all formats: rows of entries, numbered footnotes, lettered publications."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from bench.contract import run_files
from bench.report.cells import cell_text, in_column_unit
from bench.results.study import Cell, Column, Mark, Publication, Published, Row, StudyResult, Table

KINDS = {
    Mark.measured: "measured",
    Mark.calculated: "calculated",
    Mark.estimated: "estimated",
    Mark.not_advisable: "none",
    Mark.no_result: "none",
}
INTERVALS = "In brackets: the 95 % interval of the mean over runs."
COEFFICIENTS = "Coefficients: ratio to the reference arm, with 95 % interval over pairs of runs."
LEGEND = {
    Mark.calculated: "calculated from a shorter run",
    Mark.estimated: "estimated by the plan, not measured",
    Mark.not_advisable: "not recommended",
    Mark.no_result: "no result",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One cell of a table."""

    kind: str
    """measured, calculated, estimated, published, or none."""
    text: str
    number: float | None = None
    """The number for sorting."""
    notes: tuple[int, ...] = ()
    """Numbers of footnotes."""
    runs: tuple[str, ...] = ()
    """Paths of the logs of the number, relative to the folder of the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of a table: an arm or a combination of labels, or a publication's figures for it."""

    labels: tuple[str, ...]
    entries: tuple[Entry | None, ...]
    publication: str = ""
    """The letter of the publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One table."""

    title: str
    label_headings: tuple[str, ...]
    headings: tuple[str, ...]
    lines: tuple[Line, ...]
    caption: str
    """Explains the numbers, such as means of how many runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All tables of a study, with footnotes and publications."""

    grids: tuple[Grid, ...]
    footnotes: tuple[str, ...]
    publications: tuple[tuple[str, Publication], ...]
    marks: tuple[tuple[str, str], ...]
    """Marks in the tables, and their meanings."""


@dataclass(frozen=True, slots=True)
class _Writer:
    """Collects footnotes and marks while tables are laid out; footnotes are numbered in order of use."""

    result: StudyResult
    out: Path
    footnotes: dict[str, int] = field(default_factory=dict)
    marks: set[Mark] = field(default_factory=set)

    def note(self, text: str) -> tuple[int, ...]:
        return (self.footnotes.setdefault(text, len(self.footnotes) + 1),) if text else ()


def layout_of(result: StudyResult, out: Path) -> Layout:
    """Return the tables of a study; `out` is the folder they are written to, for relative links."""
    writer = _Writer(result, out)
    grids = tuple(_pivot(writer, table) for table in result.tables) or (_arms(writer),)
    letters = letters_of(result)
    return Layout(
        grids=grids,
        footnotes=tuple(writer.footnotes),
        publications=tuple((letters[one.name], one) for one in result.publications),
        marks=tuple((str(mark), meaning) for mark, meaning in LEGEND.items() if mark in writer.marks),
    )


def letters_of(result: StudyResult) -> dict[str, str]:
    """Return the letter of each publication: P1, P2, …"""
    return {one.name: f"P{number}" for number, one in enumerate(result.publications, 1)}


def heading(column: Column) -> str:
    return f"{column.title} ({column.unit})" if column.unit else column.title


def _arms(writer: _Writer) -> Grid:
    """Return the table with a row for each arm and a column for each measurement."""
    result = writer.result
    names = [column.measurement for column in result.columns]
    every = [cell for row in result.rows for cell in row.cells.values()]
    usual = _usual_count(every)
    lines: list[Line] = []
    for row in result.rows:
        cells = [row.cells.get(name) for name in names]
        lines.append(Line(labels=(row.arm,), entries=tuple(_entry(writer, cell, usual) for cell in cells)))
        lines += _published(writer, (row.arm,), [(row, name) for name in names])
    return Grid(
        title=result.title,
        label_headings=("",),
        headings=tuple(map(heading, result.columns)),
        lines=tuple(lines),
        caption=_caption(every, usual),
    )


def _pivot(writer: _Writer, table: Table) -> Grid:
    """Return a table of one measurement with labels as rows and columns."""
    result, name = writer.result, table.column.measurement
    arms = {arm: result.row(arm) for _, of_line in table.rows for arm in of_line if arm is not None}
    every = [row.cells[name] for row in arms.values() if name in row.cells]
    usual = _usual_count(every)
    lines: list[Line] = []
    for labels, of_line in table.rows:
        rows = [arms[arm] if arm is not None else None for arm in of_line]
        cells = [row.cells.get(name) if row else None for row in rows]
        lines.append(Line(labels=labels, entries=tuple(_entry(writer, cell, usual) for cell in cells)))
        lines += _published(writer, labels, [(row, name) for row in rows])
    return Grid(
        title=_title(table),
        label_headings=table.row_labels,
        headings=tuple(", ".join(map(column_heading, table.column_labels, column)) for column in table.columns),
        lines=tuple(lines),
        caption=_caption(every, usual),
    )


def _title(table: Table) -> str:
    """Return the title of a table, followed by its measurement if that is different."""
    name, of_column = table.title, table.column.title
    return (
        heading(replace(table.column, title=name))
        if name.lower() == of_column.lower()
        else f"{name}: {heading(table.column)}"
    )


def column_heading(name: str, value: str) -> str:
    """Return a label's value; a bare number is shown as `name = number`."""
    return f"{name} = {value}" if value.isdigit() else value


def _usual_count(cells: Iterable[Cell]) -> int | None:
    """Return the most common number of runs; cells with another number show it."""
    counts = Counter(cell.n for cell in cells if cell.n)
    return max(counts, key=lambda n: (counts[n], n)) if counts else None


def _caption(cells: Sequence[Cell], usual: int | None) -> str:
    if usual is None:
        return "No measurements."
    remarks = " ".join(
        text
        for text, is_used in (
            (COEFFICIENTS, any(cell.text for cell in cells)),
            (INTERVALS, any(cell.has_interval_of_mean for cell in cells)),
        )
        if is_used
    )
    if not any(cell.n and not cell.text for cell in cells):
        return f"{remarks} n = {usual} unless n is given."
    if usual == 1:
        return f"One run each (n = 1) unless n is given. {remarks}".strip()
    return f"Mean ± standard deviation of n = {usual} runs unless n is given. {remarks}".strip()


def _entry(writer: _Writer, cell: Cell | None, usual: int | None) -> Entry | None:
    if cell is None:
        return None
    writer.marks.add(cell.mark)
    count = f" (n = {cell.n})" if cell.n and cell.n != usual else ""
    return Entry(
        kind=KINDS[cell.mark],
        text=f"{cell_text(cell)}{count}",
        number=cell.value,
        notes=writer.note(cell.reason),
        runs=tuple(_address(writer, run) for run in cell.runs),
    )


def _address(writer: _Writer, run: str) -> str:
    """Return the relative path of a run's log, or of its folder if it has none."""
    folder = Path(writer.result.folder, run)
    log = folder / run_files.result(0)
    return quote(os.path.relpath(log if log.exists() else folder, writer.out))


def _published(writer: _Writer, labels: tuple[str, ...], places: Sequence[tuple[Row | None, str]]) -> Iterator[Line]:
    """Yield a row for each publication that has figures for these cells."""
    letters = letters_of(writer.result)
    published = [row.published.get(name, ()) if row else () for row, name in places]
    for name in dict.fromkeys(one.publication for figures in published for one in figures):
        entries = [_figure(writer, [one for one in figures if one.publication == name]) for figures in published]
        yield Line(labels=labels, entries=tuple(entries), publication=letters[name])


def _figure(writer: _Writer, figures: Sequence[Published]) -> Entry | None:
    """Return a publication's figure for one cell: as printed, or corrected with a footnote."""
    if not figures:
        return None
    notes = [note for one in figures for note in writer.note(remark(one))]
    return Entry(
        kind="published", text="; ".join(map(in_column_unit, figures)), number=figures[0].value, notes=tuple(notes)
    )


def remark(figure: Published) -> str:
    """Return the footnote of a published figure; empty if there is none."""
    is_changed = figure.reason and in_column_unit(figure) != figure.printed
    return f'printed as "{figure.printed}": {figure.reason}' if is_changed else figure.reason
