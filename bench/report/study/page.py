"""Build the template variables of a study's page: tables, verdicts and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.contract import run_files
from bench.errors import LogError
from bench.mlperf.result import UNVERIFIED, Result
from bench.report import curves, template
from bench.report.canvas import COLORS, canvas, save
from bench.report.drawings import Shown, shown
from bench.report.statements import STATEMENT_HEADINGS, STATEMENTS_CAPTION, statement_rows
from bench.report.study import distributions
from bench.report.study.bars import bars_chart, bars_of, draw_bars
from bench.report.study.distributions import distributions_chart, distributions_of
from bench.report.study.layout import Layout
from bench.report.study.pairs import arm_differences, draw_pairs, pairs_chart
from bench.report.study.scaling import draw_scaling, scaling_chart, scalings_of
from bench.report.study.texts import (
    NOT_LOGGED,
    comparison_rows,
    own_facts,
    provenance,
    shared_facts,
)
from bench.report.template import Chart
from bench.results import kind
from bench.results.kind import Judged
from bench.results.study import StudyResult

_MOST_ARMS = 12
"""The number of arms with curves; more could not be distinguished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRuns:
    """The results of the runs of one arm."""

    name: str
    trial_names: tuple[str, ...]
    results: tuple[Result, ...]


def logs_of(result: StudyResult) -> dict[str, dict[str, Judged]]:
    """Return the logs of the runs of each arm, by arm and by run; logs that cannot be read are left out."""
    folders = {row.arm: dict.fromkeys(run for cell in row.cells.values() for run in cell.runs) for row in result.rows}
    return {
        arm: {run: log for run in runs if (log := _read(Path(result.folder, run, run_files.result(0))))}
        for arm, runs in folders.items()
    }


def _read(log: Path) -> Judged | None:
    try:
        return kind.read(log) if log.exists() else None
    except LogError:
        return None


def runs_of(logs: Mapping[str, Mapping[str, Judged]]) -> tuple[ArmRuns, ...]:
    """Return the runs of the first arms with training logs."""
    runs: list[ArmRuns] = []
    for arm, of_arm in logs.items():
        results = {run.rpartition(".")[2]: log.result for run, log in of_arm.items() if log.result.step_times_ms}
        if results:
            runs.append(ArmRuns(name=arm, trial_names=tuple(results), results=tuple(results.values())))
    return tuple(runs[:_MOST_ARMS])


def draw_distributions(runs: Sequence[ArmRuns], path: Path, *, note: str) -> None:
    """Draw the cumulative distribution of step times as a PNG, a line for each run."""
    figure, (axes,) = canvas(3.8, "Distribution of step times", note)
    for place, arm in enumerate(runs):
        for number, result in enumerate(arm.results):
            points = curves.distribution([time_ms for _, time_ms in result.step_times_ms])
            label = arm.name if number == 0 else "_"  # matplotlib omits names that begin with _ from the legend
            color = COLORS[place % len(COLORS)]
            axes.step(*zip(*points, strict=True), where="post", color=color, linewidth=1.2, alpha=0.85, label=label)
    axes.set_ylim(0, 102)
    axes.set_xlabel("step time (ms)")
    axes.set_ylabel("steps within this time (%)")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    save(figure, path)


def context(result: StudyResult, layout: Layout, out: Path) -> dict[str, Any]:
    """Return the variables of the template; also draws the figures into the folder."""
    logs = logs_of(result)
    runs = runs_of(logs)
    figures, overlaid = draw(result, logs, runs, out), curves.overlaid(runs)
    charts: Mapping[str, Chart] = {name: chart for figure in figures for name, chart in figure.charts.items()}
    return template.context() | {
        "title": result.title,
        "unverified": UNVERIFIED,
        "result": result,
        "layout": layout,
        "comparisons": comparison_rows(result),
        "statements": statement_rows(result),
        "statement_headings": STATEMENT_HEADINGS,
        "statements_caption": STATEMENTS_CAPTION,
        "hardware": {letter: publication.hardware for letter, publication in layout.publications},
        "figures": figures,
        "curves": {name: curves.TITLES[name] for name in reversed(overlaid)},  # step times first
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


def draw(
    result: StudyResult, logs: Mapping[str, Mapping[str, Judged]], runs: Sequence[ArmRuns], out: Path
) -> list[Shown]:
    """Draw the figures as PNGs; return them with their charts."""
    parts = (result.hardware or NOT_LOGGED, f"n = {num_runs(result)} runs", result.date, result.commit)
    note = ", ".join(filter(None, parts))
    figures: list[Shown] = []
    if pairs := arm_differences(result):
        draw_pairs(pairs, out / "pairs.png", note=note)
        figures.append(shown(out / "pairs.png", _PAIRS, {"pairs": pairs_chart(pairs)}))
    for number, bars in enumerate(bars_of(result), 1):
        path = out / f"bars_{number}.png"
        draw_bars(bars, path, note=note)
        figures.append(
            shown(
                path,
                f"{bars.title}. {_BARS}{_HATCHED if bars.has_published else ''}",
                {f"bars_{number}": bars_chart(bars)},
            )
        )
    for number, scaling in enumerate(scalings_of(result), 1):
        path = out / f"scaling_{number}.png"
        draw_scaling(scaling, path, note=note)
        figures.append(shown(path, f"{scaling.title}. {_IDEAL}", {f"scaling_{number}": scaling_chart(scaling)}))
    requests = distributions_of(result, {arm: list(of_arm.values()) for arm, of_arm in logs.items()})
    for number, one in enumerate(requests, 1):
        path = out / f"cdf_{number}.png"
        distributions.draw_distributions(one, path, note=note)
        figures.append(shown(path, f"{one.title}. {_CDF}", {f"cdf_{number}": distributions_chart(one)}))
    if runs:
        draw_distributions(runs, out / "step_time_distribution.png", note=note)
    return figures


_PAIRS = "Circles: pairs of runs; diamond and whisker: mean and its interval; shaded: range that counts as equivalent."
_BARS = "Circles: runs; whiskers: 95 % interval of the mean."
_HATCHED = " Hatched and pale: published, on other hardware."
_CDF = "Share of all requests answered within a time, over all runs of an arm; failed requests are never answered."
_IDEAL = "Dashed: ideal scaling from the smallest count."
