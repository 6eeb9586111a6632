"""What the page of a study says: its tables, verdicts and figures, for its template."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.report import curves, interactive
from bench.report.drawings import Shown, shown
from bench.report.interactive import Chart
from bench.report.study.bar_pictures import bars_chart, draw_bars
from bench.report.study.bars import bars_of
from bench.report.study.layout import Layout
from bench.report.study.logs import ArmRuns, draw_distributions, runs_of
from bench.report.study.pairs import apart, draw_pairs, pairs_chart
from bench.report.study.scaling import draw_scaling, scaling_chart, scalings_of
from bench.report.study.statements import NOT_LOGGED, own_facts, provenance, shared_facts, statements
from bench.results.study import StudyResult

CURVES = {
    "step_time_distributions": "Distribution of step times",
    "step_times": "Step time along the run",
    "training_losses": "Training loss",
    "evaluations": "Evaluations",
}
"""The titles of the curves, in the order of the page."""


def context(result: StudyResult, layout: Layout, out: Path) -> dict[str, Any]:
    """Return the values that the template needs; this also draws the figures into the folder."""
    runs = runs_of(result)
    figures, overlaid = draw(result, runs, out), curves.overlaid(runs)
    charts: Mapping[str, Chart] = {name: chart for figure in figures for name, chart in figure.charts.items()}
    return interactive.context() | {
        "title": result.title,
        "result": result,
        "layout": layout,
        "statements": statements(result),
        "hardware": {letter: publication.hardware for letter, publication in layout.publications},
        "figures": figures,
        "curves": {name: title for name, title in CURVES.items() if name in overlaid},
        "charts": dict(charts) | overlaid,
        "provenance": list(provenance(result)),
        "facts": shared_facts(result),
        "own_facts": own_facts(result),
        "num_arms": len(result.rows),
        "num_runs": num_runs(result),
        "num_with_numbers": sum(any(cell.n for cell in row.cells.values()) for row in result.rows),
        "versions": {"runstop": version("runstop")},
    }


def num_runs(result: StudyResult) -> int:
    return len({run for row in result.rows for cell in row.cells.values() for run in cell.runs})


def draw(result: StudyResult, runs: Sequence[ArmRuns], out: Path) -> list[Shown]:
    """Draw the figures as PNGs; return them with their charts."""
    parts = (result.hardware or NOT_LOGGED, f"n = {num_runs(result)} runs", result.date, result.commit)
    note = ", ".join(filter(None, parts))
    found: list[Shown] = []
    if pairs := apart(result):
        draw_pairs(pairs, out / "pairs.png", note=note)
        found.append(shown(out / "pairs.png", _PAIRS, {"pairs": pairs_chart(pairs)}))
    for number, bars in enumerate(bars_of(result), 1):
        path = out / f"bars_{number}.png"
        draw_bars(bars, path, note=note)
        found.append(
            shown(
                path,
                f"{bars.title}. {_BARS}{_HATCHED if bars.has_published else ''}",
                {f"bars_{number}": bars_chart(bars)},
            )
        )
    for number, scaling in enumerate(scalings_of(result), 1):
        path = out / f"scaling_{number}.png"
        draw_scaling(scaling, path, note=note)
        found.append(shown(path, f"{scaling.title}. {_IDEAL}", {f"scaling_{number}": scaling_chart(scaling)}))
    if runs:
        draw_distributions(runs, out / "step_time_distribution.png", note=note)
    return found


_PAIRS = "Circles: pairs of runs; diamond and whisker: their mean and its interval; shaded: what counts as equivalent."
_BARS = "Bars from zero; circles: runs; whiskers: 95 % interval of their mean."
_HATCHED = " Hatched and pale: published, on other hardware."
_IDEAL = "Dashed: the ideal, which keeps the rate of each GPU at the smallest count."
