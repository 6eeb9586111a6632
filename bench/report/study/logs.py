"""The logs of a study's runs, for what its tables do not hold: curves, and distributions of step times."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contract import run_files
from bench.errors import LogError
from bench.mlperf.result import Result, parse
from bench.report import curves
from bench.report.canvas import canvas, save
from bench.report.palette import COLORS
from bench.results.study import StudyResult

_MOST_ARMS = 12
"""Curves of more arms cannot be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRuns:
    """The results of the runs of one arm."""

    name: str
    trial_names: tuple[str, ...]
    results: tuple[Result, ...]


def runs_of(result: StudyResult) -> tuple[ArmRuns, ...]:
    """Return the runs of the first arms that left logs of training; a log that cannot be read has no curve."""
    found: list[ArmRuns] = []
    for row in result.rows:
        folders = dict.fromkeys(run for cell in row.cells.values() for run in cell.runs)
        read = {folder: _read(Path(result.folder, folder, run_files.result(0))) for folder in folders}
        results = {folder.rpartition(".")[2]: one for folder, one in read.items() if one and one.step_times_ms}
        if results:
            found.append(ArmRuns(name=row.arm, trial_names=tuple(results), results=tuple(results.values())))
    return tuple(found[:_MOST_ARMS])


def _read(log: Path) -> Result | None:
    try:
        return parse(log) if log.exists() else None
    except LogError:
        return None


def draw_distributions(runs: Sequence[ArmRuns], path: Path, *, note: str) -> None:
    """Draw the share of steps within a time, a line for each run, as a PNG."""
    figure, (axes,) = canvas(3.8, "Distribution of step times", note)
    for place, arm in enumerate(runs):
        for number, result in enumerate(arm.results):
            points = curves.distribution([time_ms for _, time_ms in result.step_times_ms])
            label = arm.name if number == 0 else "_"  # matplotlib lists no name that begins with _
            color = COLORS[place % len(COLORS)]
            axes.step(*zip(*points, strict=True), where="post", color=color, linewidth=1.2, alpha=0.85, label=label)
    axes.set_ylim(0, 102)
    axes.set_xlabel("step time (ms)")
    axes.set_ylabel("steps within this time (%)")
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    save(figure, path)
