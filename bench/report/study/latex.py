"""A study's tables as LaTeX for \\input; requires the booktabs package only."""

import re
from collections.abc import Iterator

from bench.mlperf.reader import clean
from bench.report.study.layout import Entry, Grid, Layout, Line
from bench.report.study.texts import NOT_LOGGED
from bench.results.study import StudyResult

_ESCAPES = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"$\sim$",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "±": r"$\pm$",
        "×": r"$\times$",
        "µ": r"$\mu$",
        **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    }
)
_QUOTED = re.compile('"([^"]*)"')


def latex(result: StudyResult, layout: Layout) -> str:
    """Return one table environment for each table; published figures are in italics."""
    head = [
        f"% {clean(result.title)}",
        rf"% \usepackage{{booktabs}}, then \input{{table.tex}}. Written by: {clean(result.command)} --table",
    ]
    return "\n".join([*head, *(line for grid in layout.grids for line in _table(grid, result, layout))]) + "\n"


def _table(grid: Grid, result: StudyResult, layout: Layout) -> Iterator[str]:
    yield r"\begin{table}"
    yield r"  \centering"
    yield rf"  \caption{{{_text(grid.title)}}}"
    yield rf"  \begin{{tabular}}{{{'l' * len(grid.label_headings)}{'r' * len(grid.headings)}}}"
    yield r"    \toprule"
    yield _row([_text(heading) for heading in (*grid.label_headings, *grid.headings)])
    yield r"    \midrule"
    yield from (_row(_cells(line)) for line in grid.lines)
    yield r"    \bottomrule"
    yield r"  \end{tabular}"
    yield ""
    yield r"  \smallskip"
    yield r"  \begin{minipage}{\linewidth}\footnotesize"
    yield from (f"    {remark}" for remark in _remarks(grid, result, layout))
    yield r"  \end{minipage}"
    yield r"\end{table}"


def _row(cells: list[str]) -> str:
    """Return a row. LaTeX would read a bracket or star at its start as an argument of the previous row's end."""
    guard = "{}" if cells[0].startswith(("[", "*")) else ""
    return f"    {guard}{' & '.join(cells)} \\\\"


def _cells(line: Line) -> list[str]:
    labels = [_text(label) for label in line.labels]
    if line.publication:
        labels = [*("" for _ in labels[1:]), rf"\quad published [{line.publication}]"]
    return [*labels, *map(_entry, line.entries)]


def _entry(entry: Entry | None) -> str:
    if entry is None:
        return ""
    text = "--" if entry.text == "-" else _text(entry.text)
    text = rf"\textit{{{text}}}" if entry.kind == "published" else text
    return text + (rf"\textsuperscript{{{','.join(map(str, entry.notes))}}}" if entry.notes else "")


def _remarks(grid: Grid, result: StudyResult, layout: Layout) -> Iterator[str]:
    """Yield the notes below a table that its cells refer to."""
    entries = [entry for line in grid.lines for entry in line.entries if entry]
    yield _text(f"{grid.caption} Measured on {result.hardware or NOT_LOGGED}, {result.date or 'no date'}.")
    for mark, meaning in layout.marks:
        if any(entry.text.split()[0] == mark for entry in entries):
            yield f"{'--' if mark == '-' else _text(mark)}: {_text(meaning)}."
    used = {number for entry in entries for number in entry.notes}
    for number, note in enumerate(layout.footnotes, 1):
        if number in used:
            yield rf"\textsuperscript{{{number}}}{_text(note)}."
    cited = {line.publication for line in grid.lines}
    for letter, one in layout.publications:
        if letter in cited:
            yield rf"[{letter}] \textit{{published}}: {_text(f'{one.title}, {one.place}; {one.hardware}, {one.date}')}."


def _text(text: str) -> str:
    """Return text with LaTeX's special characters escaped."""
    return _QUOTED.sub(r"``\1''", clean(text).translate(_ESCAPES))
