"""The page of trials that are shown separately: generation, serving, kernels, and kinds that a user adds."""

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import atomic_files
from bench.mlperf.result import UNVERIFIED, Result
from bench.report import described_logs, template
from bench.report.tables import TextTable
from bench.report.template import Card

if TYPE_CHECKING:
    from bench.report.drawings import Shown
    from bench.report.kinds import ShownTrial, TrialsReport

_NUMBER = re.compile(r"-|[-+<]?\d[\d,.]*( (%|GiB|s|ms))?")
_FIXED_LETTERS = 24
"""Cells of a column with at most this many characters are not wrapped."""
_ROW_HEADINGS = ("measurement", "value", "remark")


def page(report: "TrialsReport[Any]", figures: "Sequence[Shown]", heading: str) -> str:
    """Return the HTML page of some trials; their figures have been drawn."""
    trials, shown = report.trials, report.shown
    results = [trial.judged.result for trial in trials]
    sections = [
        {
            "name": trial.name,
            "cards": [_valid_card(trial), *shown.cards(trial)],
            "problems": trial.judged.problems,
            "tables": [grid(table) for table in shown.tables(trial)],
            "details": [grid(table) for table in shown.detail_tables(trial)],
        }
        for trial in trials
    ]
    hardware = dict.fromkeys(result.platform for result in results if result.platform)
    context = template.context(has_charts=bool(figures)) | {
        "title": heading,
        "unverified": UNVERIFIED,
        "identity": described_logs.identity(results, [Path(one.name).parent.name or one.name for one in trials]),
        "hardware": "; ".join(hardware) or "Hardware not logged",
        "sections": sections,
        "figures": figures,
        "charts": {name: chart for one in figures for name, chart in one.charts.items()},
        "system": dict(pair for result in results for pair in described_logs.system(result)),
        "settings": described_logs.settings(results),
        "files": [(one.name, *_file(one.judged.result)) for one in trials],
        "versions": {"runstop": version("runstop")},
    }
    return template.page("trials.html.j2", context)


def _valid_card(trial: "ShownTrial[Any]") -> Card:
    name, value, why = trial.valid_row
    return Card(name=name, value=value, note=why, is_bad=value != "yes")


def _file(result: Result) -> tuple[str, str, str]:
    path = Path(result.file)
    return described_logs.date(result.run_start_ms), path.name, atomic_files.sha256(path)


def grid(table: TextTable) -> dict[str, Any]:
    """Return the template variables of a table; columns of numbers are aligned at the right."""
    columns = table.columns or _ROW_HEADINGS[: max((len(row) for row in table.rows), default=0)]
    return {
        "title": table.title if table.columns else "Measurements",
        "columns": columns,
        "rows": table.rows,
        "caption": table.caption.replace("\n", " "),
        "numeric": set(_numeric(table.rows, len(columns))) if table.columns else set(),
        "fixed": {column for column in range(len(columns)) if _longest(table.rows, column) <= _FIXED_LETTERS},
    }


def _longest(rows: Sequence[Sequence[str]], column: int) -> int:
    return max((len(row[column]) for row in rows if len(row) > column), default=0)


def _numeric(rows: Sequence[Sequence[str]], num_columns: int) -> Iterator[int]:
    for column in range(1, num_columns):
        cells = [row[column] for row in rows if len(row) > column and row[column]]
        if cells and 2 * sum(bool(_NUMBER.fullmatch(cell)) for cell in cells) > len(cells):
            yield column
