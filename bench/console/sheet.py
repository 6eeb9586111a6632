"""A sheet: rows of text that become a table on a terminal and plain lines in a pipe."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from bench.mlperf.reader import printable

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class Sheet:
    """Rows of text to show: a table on a terminal, plain lines in a pipe."""

    title: str
    rows: Sequence[Sequence[str]]
    columns: Sequence[str] = ()
    """Headings; none for rows of name, value and an optional remark."""
    caption: str = ""


Row = tuple[str, str, str]
"""What, its value, and why it is so or missing."""


def show(sheet: Sheet, *, file: TextIO | None = None) -> None:
    """Print a sheet to stdout (or file). Text from logs cannot steer the terminal.

    In a pipe: title, then `name: value  remark` lines, or tab-separated columns below their headings; then the caption.
    """
    out = file or sys.stdout
    if out.isatty():
        from rich.console import Console

        Console(file=out).print(_table(sheet))
        return
    rows = [[printable(cell) for cell in row] for row in (*([sheet.columns] if sheet.columns else []), *sheet.rows)]
    lines = ["\t".join(row) if sheet.columns else f"{row[0]}: {'  '.join(filter(None, row[1:]))}" for row in rows]
    for line in (printable(sheet.title), *lines, *sheet.caption.splitlines()):
        print(line, file=out)


def _table(sheet: Sheet) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=sheet.title, caption=sheet.caption, title_justify="left", caption_justify="left")
    table.show_header = bool(sheet.columns)
    for column in sheet.columns:
        table.add_column(column, overflow="fold")
    if not sheet.columns:
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
    for row in sheet.rows:
        if sheet.columns:
            table.add_row(*(Text(printable(cell)) for cell in row))
        else:
            name, value, *why = (printable(cell) for cell in row)
            gap = "  " if value and any(why) else ""
            table.add_row(Text(name), Text.assemble((value, "bold" if why else ""), gap, ("".join(why), "dim")))
    return table
