"""What kernels tasks measured as files to hand on: a page, every point as CSV, and the figures."""

import csv
import io
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.report import drawings, interactive, kernel_figures, kernel_rows, output_folder, template
from bench.report.data_frames import inert
from bench.report.trials import ReadTrial
from bench.results.kernels import KernelsResult, Measured

PAGE, TABLE, TEMPLATE = "report.html", "kernels.csv", "kernels.html.j2"
_FILES = re.compile(rf"report\.html|kernels\.csv|({'|'.join(kernel_figures.NAMES)})\.png")
"""Names of what such a report consists of."""
_COLUMNS = (
    *("trial", "point", "kernel", "variant", "ranks", "latency_us", "p10_us", "p90_us", "n"),
    *("rate", "unit", "share_of_peak", "limit", "rank", "ran"),
)


def write(trials: Sequence[ReadTrial[KernelsResult]], out: Path, *, heading: str) -> Path:
    """Write the page, the table of every point and the figures into a folder; return the page's path.

    The figures are those of the last trial that measured anything.

    Raises:
        ConfigError: the folder cannot be made or written, or holds files of these names that are not ours.
    """
    output_folder.write(out, lambda part: _write(trials, part, heading=heading), page=PAGE, names=_FILES)
    return out / PAGE


def _write(trials: Sequence[ReadTrial[KernelsResult]], out: Path, *, heading: str) -> None:
    (out / TABLE).write_text(csv_text(trials), encoding="utf-8")
    drawn = next((one for one in reversed(trials) if one.found.measured), None)
    files = []
    if drawn is not None:
        note = f"{drawn.result.platform or 'platform not logged'}, n = 1 run; shaded: 10th to 90th percentile"
        files = kernel_figures.draw(drawn.found, out, heading=heading, note=note)
    context = {
        "title": heading,
        "sections": [_section(trial) for trial in trials],
        "figures": [drawings.shown(file, f"{drawn.name if drawn else ''}:") for file in files],
        "charts": {},
        "versions": {"runstop": version("runstop")},
    }
    (out / PAGE).write_text(template.page(TEMPLATE, context | interactive.context(has_charts=False)), encoding="utf-8")


def _section(trial: ReadTrial[KernelsResult]) -> dict[str, Any]:
    """Return what the page says of a trial."""
    kernels, minutes = trial.found, trial.result.minutes
    asked = len(kernels.measured) + len(kernels.missing)
    verdict = "every point was measured, and no limit missed" if trial.is_proven else "not proven"
    took = "" if minutes is None else f" in {minutes:.2f} min"
    bests = [kernel_rows.best_row(best) for best in kernels.bests]
    points = [kernel_rows.point_row(one) for one in kernels.measured]
    errors = [finding.what for finding in trial.result.findings if finding.severity == "error"]
    return {
        "name": trial.name,
        "lead": f"{len(kernels.measured)} of {asked} points measured{took}: {verdict}.",
        "problems": [*errors, *kernels.problems],
        "bests": _grid(kernel_rows.BEST_COLUMNS, bests, kernel_rows.bests_caption(kernels)),
        "points": _grid(kernel_rows.POINT_COLUMNS, points, kernel_rows.POINTS_CAPTION),
    }


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> dict[str, Any]:
    return {"columns": columns, "rows": rows, "caption": caption, "words": ("unit", "within", "of", "ran")}


def csv_text(trials: Sequence[ReadTrial[KernelsResult]]) -> str:
    """Return every point of every trial as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for trial in trials:
        writer.writerows([inert(value) for value in (trial.name, *_row(one))] for one in trial.found.measured)
    return text.getvalue()


def _row(one: Measured) -> list[object]:
    point = one.point
    shares = (one.share_of_peak, point.limit)
    times = (one.latency_us, one.p10_us, one.p90_us, one.n)
    return [
        point.name,
        point.kernel,
        point.variant,
        point.ranks,
        *times,
        one.rate,
        point.unit,
        *shares,
        one.rank,
        one.ran,
    ]
