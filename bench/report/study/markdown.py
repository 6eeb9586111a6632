"""A study as Markdown, for a README, an issue or a chat."""

import re
from collections.abc import Iterator, Sequence

from bench.mlperf.reader import clean
from bench.report.statements import STATEMENT_HEADINGS, STATEMENTS_CAPTION, statement_rows
from bench.report.study.layout import Entry, Grid, Layout, Line
from bench.report.study.texts import (
    comparison_rows,
    provenance,
    shared_facts,
)
from bench.results.study import StudyResult


def markdown(result: StudyResult, layout: Layout) -> str:
    """Return the tables with their footnotes, the comparisons, and how it was measured; runs are links."""
    parts = [f"# {_text(result.title)}", _text(result.question)]
    for grid in layout.grids:
        parts += [f"## {_text(grid.title)}"] if grid.title != result.title else []
        parts += [_grid(grid), _caption(grid, layout)]
    if layout.footnotes:
        parts.append("\n".join(f"{number}. {_text(note)}" for number, note in enumerate(layout.footnotes, 1)))
    if result.differences:
        parts += ["## Comparisons", _comparisons(result), "Difference: first / second, from the values of whole runs."]
    if result.statements:
        parts += ["## Statements", _statements(result), STATEMENTS_CAPTION]
    if layout.publications:
        parts += ["## Published figures", "\n".join(_publications(layout))]
    parts += ["## How it was measured", "\n".join(_measured(result))]
    return "\n\n".join(parts) + "\n"


def _grid(grid: Grid) -> str:
    alignment = ["---"] * len(grid.label_headings) + ["---:"] * len(grid.headings)
    return _table([*grid.label_headings, *grid.headings], alignment, [_cells(line) for line in grid.lines])


def _cells(line: Line) -> list[str]:
    labels = [_text(label) for label in line.labels]
    if line.publication:
        labels = ["", *labels[1:-1], f"published, {line.publication}"][-len(labels) :]
    return [*labels, *map(_entry, line.entries)]


def _entry(entry: Entry | None) -> str:
    if entry is None:
        return ""
    text = _text(entry.text)
    if len(entry.runs) == 1:
        text = f"[{text}]({entry.runs[0]})"
    elif entry.runs:
        text += " (" + ", ".join(f"[{number}]({run})" for number, run in enumerate(entry.runs, 1)) + ")"
    return text + "".join(f"<sup>{number}</sup>" for number in entry.notes)


def _caption(grid: Grid, layout: Layout) -> str:
    marks = "".join(f" {_text(mark)}: {meaning}." for mark, meaning in layout.marks)
    is_linked = any(len(entry.runs) > 1 for line in grid.lines for entry in line.entries if entry)
    links = " In brackets: links to the logs." if is_linked else ""
    return f"{grid.caption}{links}{marks}"


def _comparisons(result: StudyResult) -> str:
    headings = ["first / second", "measurement", "means", "difference", "interval", "n", "verdict"]
    rows = []
    for one in comparison_rows(result):
        verdict = f"{one.verdict} ({one.notes})" if one.notes else one.verdict
        rows.append([*map(_text, (one.pair, one.measurement, one.values, one.percent, one.interval, one.n, verdict))])
    return _table(headings, ["---", "---", "---:", "---:", "---:", "---:", "---"], rows)


def _statements(result: StudyResult) -> str:
    rows = [[*map(_text, row)] for row in statement_rows(result)]
    return _table(STATEMENT_HEADINGS, ["---"] * len(STATEMENT_HEADINGS), rows)


def _publications(layout: Layout) -> Iterator[str]:
    for letter, one in layout.publications:
        yield f"- {letter}: " + _text(f"{one.title}, {one.place}; measured on {one.hardware}, {one.date}")


def _measured(result: StudyResult) -> Iterator[str]:
    for name, value in (*provenance(result), *shared_facts(result).items()):
        yield f"- {_text(name)}: {_text(value)}"
    yield from (f"- {_text(note)}" for note in result.notes)


def _table(headings: Sequence[str], alignment: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headings, alignment, *rows))


def _text(text: str) -> str:
    """Return text with Markdown's special characters escaped."""
    return re.sub(r"([\\`*_\[\]<>|~#])", r"\\\1", clean(text))
