"""What kernels tasks measured as files to hand on: every point as CSV, and the figures."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contract.new_folder import existing
from bench.errors import ConfigError
from bench.mlperf import log as logs
from bench.mlperf import result as results
from bench.mlperf.result import Result
from bench.report import kernel_figures
from bench.results import kernels as kernel_results
from bench.results.kernels import KernelsResult, Measured

TABLE = "kernels.csv"
_COLUMNS = (
    *("trial", "point", "kernel", "variant", "ranks", "latency_us", "p10_us", "p90_us", "n"),
    *("rate", "unit", "share_of_peak", "limit", "rank", "ran"),
)


@dataclass(frozen=True, slots=True)
class KernelsTrial:
    """The log of one trial of a kernels task, read."""

    name: str
    result: Result
    kernels: KernelsResult

    @property
    def is_proven(self) -> bool:
        return self.result.valid and self.kernels.proven


def load(paths: Sequence[Path]) -> list[KernelsTrial]:
    """Return the trials of kernels tasks among run folders and logs, in their order; those of other kinds are left.

    Raises:
        LogError: a log cannot be read.
    """
    found = []
    for path in paths:
        for file in sorted(path.glob("result_*.txt")) if path.is_dir() else [path]:
            kernels = kernel_results.read(logs.read(file)) if file.is_file() else None
            if kernels is not None:
                name = f"{file.parent.name}/{file.stem}" if path.is_dir() else str(file)
                found.append(KernelsTrial(name, results.parse(file), kernels))
    return found


def write(trials: Sequence[KernelsTrial], out: Path, *, heading: str) -> list[Path]:
    """Write the table of all trials and the figures of the last one that measured anything; return the files.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    try:
        with existing(out):
            table = out / TABLE
            table.write_text(csv_text(trials), encoding="utf-8")
            drawn = next((one for one in reversed(trials) if one.kernels.measured), None)
            if drawn is None:
                return [table]
            note = f"{drawn.result.platform or 'platform not logged'}, n = 1 run; shaded: 10th to 90th percentile"
            return [table, *kernel_figures.draw(drawn.kernels, out, heading=heading, note=note)]
    except OSError as error:
        what = f"the figures cannot be written: {error.strerror}"
        raise ConfigError(what, where=str(out), fix="name another folder") from error


def csv_text(trials: Sequence[KernelsTrial]) -> str:
    """Return every point of every trial as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for trial in trials:
        writer.writerows([trial.name, *_row(one)] for one in trial.kernels.measured)
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
