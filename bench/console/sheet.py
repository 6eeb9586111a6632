"""Print a TextTable: as a table on a terminal, as plain lines in a pipe."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias

from bench.hints import has_command, in_this_shell
from bench.mlperf.reader import clean
from bench.report.tables import TextTable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


_STYLES = {
    **dict.fromkeys(("yes", "passed", "valid", "intact", "COMPLETED"), "green"),
    **dict.fromkeys(("no", "failed", "invalid", "problem", "error", "aborted", "FAILED", "TIMEOUT"), "red"),
    **dict.fromkeys(("warning", "interrupted", "not checked", "CANCELLED"), "yellow"),
}
"""Verdicts, and their colours on a terminal."""
_VERDICT_COLUMNS = ("valid", "MLPerf checker", "severity", "fits", "state", "verified")
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( %)?")
_TEXT_WIDTH = 20
"""Minimum width of a text column; a table that does not fit is printed row by row."""
_NAME_WIDTH = 44
"""Names up to this length are never broken, so that they can be copied."""
_GAP = 2
"""Spaces between two columns."""
_VALUE_WIDTH = 12
"""Minimum width of the values next to names."""
_LEAST = 3
"""Columns of a list that the narrowest terminal shows, too."""


def show(sheet: TextTable, *, file: TextIO | None = None) -> None:
    """Print a sheet to stdout (or file). Control characters from logs are escaped and secrets are masked.

    On a terminal, a command is never broken into two lines, so that it can be copied.
    In a pipe: title, then `name: value  remark` lines, or tab-separated columns below their headings; then the caption.
    """
    out, written = file or sys.stdout, _cleaned(sheet)
    sheet = _for_this_shell(written)
    if out.isatty():
        from rich.console import Console

        console = Console(file=out, highlight=False, markup=False)
        wrapped, below = _without_wide_commands(sheet, written, console.width)
        table = _table(wrapped, console.width)
        title, caption, table.title, table.caption = table.title, table.caption, None, None
        for part in (title, table if wrapped.rows else None, caption):  # only the table has the width of the table
            if part:
                console.print(part)
        for line in below:
            console.print(line, style="dim", soft_wrap=True)
        console.print()
        return
    rows = [*([sheet.columns] if sheet.columns else []), *sheet.rows]
    lines = ["\t".join(row) if sheet.columns else f"{row[0]}: {'  '.join(filter(None, row[1:]))}" for row in rows]
    for line in (sheet.title, *lines, *sheet.caption.splitlines()):
        print(line, file=out)


def _cleaned(sheet: TextTable) -> TextTable:
    """Return a sheet with control characters escaped and secrets masked in all texts."""
    return replace(
        sheet,
        title=clean(sheet.title),
        rows=[[clean(cell) for cell in row] for row in sheet.rows],
        columns=[clean(column) for column in sheet.columns],
        caption="\n".join(map(clean, sheet.caption.splitlines())),
    )


def _for_this_shell(sheet: TextTable) -> TextTable:
    """Return a sheet whose commands work in this shell."""
    rows = [[in_this_shell(cell) for cell in row] for row in sheet.rows]
    return replace(sheet, rows=rows, caption=in_this_shell(sheet.caption))


def _without_wide_commands(sheet: TextTable, written: TextTable, width: int) -> tuple[TextTable, list[str]]:
    """Return the part of a sheet that can be wrapped, and the lines with commands that would be.

    `written` is the sheet before `_for_this_shell`: a command with a full path is not recognized.
    """
    names = 0 if sheet.columns else max((len(row[0]) for row in sheet.rows), default=0) + _GAP
    wide = [
        row
        for row, text in zip(sheet.rows, written.rows, strict=True)
        if names and has_command(text[1]) and names + len("  ".join(row[1:])) > width
    ]
    caption = sheet.caption.splitlines()
    long = [
        line
        for line, text in zip(caption, written.caption.splitlines(), strict=True)
        if has_command(text) and len(line) > width
    ]
    kept = replace(
        sheet,
        rows=[row for row in sheet.rows if row not in wide],
        caption="\n".join(line for line in caption if line not in long),
    )
    return kept, [*(f"{row[0]}: {'  '.join(filter(None, row[1:]))}" for row in wide), *long]


def _table(sheet: TextTable, width: int) -> "Table":
    """Return a table that is at most `width` wide."""
    if not sheet.columns:
        return _pairs(sheet, width)
    if sheet.is_list:
        return _list(sheet, width)
    needed = [_needed(sheet, place) for place in range(len(sheet.columns))]
    ends = [sum(needed[:count]) + _GAP * count - 1 for count in range(1, len(needed) + 1)]
    least = len(needed) - sheet.num_optional
    fitting = max((count for count, end in enumerate(ends, 1) if end <= width), default=0)
    return _grid(sheet, fitting, width_of_all=ends[-1]) if fitting >= least else _records(sheet)


def _needed(sheet: TextTable, place: int) -> int:
    """Return the minimum width of a readable column: that of its numbers, or of a few words of its text."""
    cells = [len(row[place]) for row in sheet.rows]
    headings = [len(line) for line in _heading(sheet, place).splitlines()]
    longest = max(cells, default=0)
    if _is_numeric(sheet, place):
        return max(longest, *headings)
    name = max((len(part) for row in sheet.rows for part in row[place].split(" ")), default=0)
    return max(min(longest, _TEXT_WIDTH), min(name, _NAME_WIDTH), *headings)


def _is_numeric(sheet: TextTable, place: int) -> bool:
    cells = [cell for row in sheet.rows if (cell := row[place])]
    return bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)


def _heading(sheet: TextTable, place: int) -> str:
    """Return a heading, wrapped to the width of its column or of its longest word."""
    widest = max((len(row[place]) for row in sheet.rows), default=0)
    lines = [""]
    for part in sheet.columns[place].replace("-", "-\0").replace("\0", " \0").split(" "):
        part, gap = (part[1:], "") if part.startswith("\0") else (part, " ")
        joined = f"{lines[-1]}{gap}{part}".strip()
        if lines[-1] and len(joined) > widest:
            lines.append(part)
        else:
            lines[-1] = joined
    return "\n".join(lines)


def _grid(sheet: TextTable, count: int, *, width_of_all: int) -> "Table":
    """Return the first columns of a sheet, and a caption that names the columns left out."""
    from rich.text import Text

    table = _empty(sheet, caption=_caption(sheet, sheet.columns[count:], width_of_all=width_of_all))
    for place in range(count):
        is_numeric = _is_numeric(sheet, place)
        table.add_column(
            Text(_heading(sheet, place)),
            justify="right" if is_numeric else "left",
            no_wrap=is_numeric,
            min_width=_needed(sheet, place),
            overflow="fold",
        )
    for row in sheet.rows:
        table.add_row(*(_cell(cell, sheet.columns[place]) for place, cell in enumerate(row[:count])))
    return table


def _list(sheet: TextTable, width: int) -> "Table":
    """Return the rows on one line each: the first columns that fit, without empty ones."""
    from rich.text import Text

    filled = [place for place in range(len(sheet.columns)) if not place or any(row[place] for row in sheet.rows)]
    longest = [
        max(len(text) for text in (sheet.columns[place], *(row[place] for row in sheet.rows))) for place in filled
    ]
    widths = [min(length, _TEXT_WIDTH) if number else length for number, length in enumerate(longest)]
    ends = [sum(widths[:count]) + _GAP * count - 1 for count in range(1, len(widths) + 1)]
    fitting = max(min(_LEAST, len(ends)), *(count for count, end in enumerate(ends, 1) if end <= width), 0)
    free = width - ends[fitting - 1]
    widths[0] = max(_TEXT_WIDTH, widths[0] + min(0, free))
    for number in range(1, fitting):  # texts that were cut get the free space
        more = max(0, min(longest[number] - widths[number], free))
        widths[number], free = widths[number] + more, free - more
    left_out = [sheet.columns[place] for place in filled[fitting:]]
    table = _empty(sheet, caption=_caption(sheet, left_out, width_of_all=ends[-1]))
    for number, place in enumerate(filled[:fitting]):
        justify: Literal["left", "right"] = "right" if _is_numeric(sheet, place) else "left"
        overflow: Literal["fold", "ellipsis"] = "ellipsis" if number else "fold"
        heading = Text(sheet.columns[place])
        table.add_column(heading, justify=justify, no_wrap=bool(number), overflow=overflow, width=widths[number])
    for row in sheet.rows:
        table.add_row(*(_cell(row[place], sheet.columns[place]) for place in filled[:fitting]))
    return table


def _caption(sheet: TextTable, left_out: Sequence[str], *, width_of_all: int) -> str:
    """Return the caption, and which columns are left out."""
    more = f"not shown (needs {width_of_all} columns of terminal width): {', '.join(left_out)}" if left_out else ""
    return "\n".join(filter(None, (sheet.caption, more)))


def _records(sheet: TextTable) -> "Table":
    """Return each row as names and values below one another, for terminals too narrow for columns."""
    from rich.text import Text

    table = _empty(sheet, caption=sheet.caption)
    table.show_header = False
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for row in sheet.rows:
        filled = [(name, cell) for name, cell in zip(sheet.columns, row, strict=True) if cell]
        for number, (name, cell) in enumerate(filled, 1):
            table.add_row(Text(name), _cell(cell, name), end_section=number == len(filled))
    return table


def _pairs(sheet: TextTable, width: int) -> "Table":
    """Return rows of name, value and remark; names are broken into lines if they leave too little for the values."""
    from rich.text import Text

    table = _empty(sheet, caption=sheet.caption)
    table.show_header = False
    longest = max((len(row[0]) for row in sheet.rows), default=0)
    is_tight = longest + _GAP > width - _VALUE_WIDTH
    table.add_column(no_wrap=not is_tight, overflow="fold")
    table.add_column(min_width=_VALUE_WIDTH if is_tight else None, overflow="fold")
    for row in sheet.rows:
        name, value, *why = row
        gap = "  " if value and any(why) else ""
        style = f"bold {_STYLES.get(value, '')}".strip() if why else ""
        table.add_row(Text(name), Text.assemble((value, style), gap, ("".join(why), "dim")))
    return table


def _empty(sheet: TextTable, *, caption: str) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    return Table(
        title=Text(sheet.title, style="bold", justify="left"),
        caption=Text(caption, style="dim", justify="left"),
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),  # plus the space where tables with lines have a separator
        title_justify="left",
        caption_justify="left",
    )


def _cell(cell: str, column: str) -> "Text":
    from rich.text import Text

    return Text(cell, style=_STYLES.get(cell, "") if column in _VERDICT_COLUMNS else "")


if TYPE_CHECKING:
    from rich.console import Console

    Messages: TypeAlias = Console


def to_stderr() -> "Messages":
    """Return a console on stderr whose commands work in this shell, in lines that are not wrapped."""
    from rich.console import Console

    class Screen(Console):
        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*(in_this_shell(each) if isinstance(each, str) else each for each in objects), **how)

    return Screen(stderr=True, soft_wrap=True, highlight=False, markup=False)
