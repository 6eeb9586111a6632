"""Published figures of MLPerf Training as data: systems with their scores, and how many samples their runs needed.

All data is from the public result rounds and is in `data/` next to this file. Each file names its source.
"""

import csv
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from statistics import NormalDist, fmean, pstdev
from typing import Any, Literal

from bench.mlperf.benchmarks import BENCHMARKS, Schedule

DATA = files("bench.mlperf") / "data"
_TAIL_STDEVS = 4
"""An interpolated distribution ends this many standard deviations above its mean."""

Kind = Literal["submissions", "reference runs", "interpolated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A published system with its minutes to target; a field is None if it is not known."""

    round: str
    submitter: str
    system: str
    """Empty if the name of the submission is not known; so may be the submitter."""
    num_gpus: int
    accelerator: str
    global_batch_size: int | None
    num_runs: int | None
    """Runs in official_minutes: ten for a score; a single run is not a score."""
    num_failed: int | None
    """Runs that did not converge; one may count as the slowest."""
    olympic_minutes: float | None
    """Mean without the fastest and the slowest run."""
    rcp_factor: float | None
    """At least 1; above 1 if the runs converged faster than the reference."""
    official_minutes: float
    """The published score, olympic_minutes * rcp_factor; for a single run its logged minutes."""
    mean_samples: float | None
    """Mean samples to target of the runs that converged."""
    step_time_s: float | None
    """Mean inside training blocks."""

    @property
    def name(self) -> str:
        """Round, submitter and system, as far as they are known."""
        known = f"{self.submitter} {self.system}".strip() or "unnamed system"
        return f"{self.round} {known}{'' if self.is_score else ' (one run, not a score)'}"

    @property
    def is_score(self) -> bool:
        """Whether official_minutes is a score, not the time of a single run."""
        return self.num_runs != 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Convergence:
    """How many samples the runs of a benchmark need to reach its target at one global batch size."""

    benchmark: str
    global_batch_size: int
    kind: Kind
    """Runs of submissions, runs of the reference, or a normal distribution between reference batch sizes."""
    shares: tuple[tuple[int, float], ...]
    """(samples at the evaluation that reached the target, share of the runs); the shares add up to 1."""
    num_runs: int
    """Runs counted; if interpolated, of both neighbouring batch sizes together."""
    source: str

    @property
    def mean_samples(self) -> float:
        return sum(samples * share for samples, share in self.shares)

    def reached_by(self, samples: float) -> float:
        """Return the share of runs that reach the target within this many samples, also between two evaluations.

        A run that reached it at an evaluation did so at any point of the interval before it, with equal probability.
        """
        interval = schedule(self.benchmark).interval(self.global_batch_size)
        return sum(share * min(1.0, max(0.0, 1 - (at - samples) / interval)) for at, share in self.shares)


@cache
def systems(benchmark: str = "llama2_70b_lora") -> tuple[System, ...]:
    """Return every published system, by round; empty for a benchmark without data here."""
    table = DATA / f"{benchmark}.csv"
    if benchmark not in _benchmarks() or not table.is_file():
        return ()
    lines = (line for line in table.read_text("utf-8").splitlines() if not line.startswith("#"))
    return tuple(_system(row) for row in csv.DictReader(lines))


def _system(row: dict[str, str]) -> System:
    return System(
        round=row["round"],
        submitter=row["submitter"],
        system=row["system"],
        num_gpus=int(row["num_gpus"]),
        accelerator=row["accelerator"],
        global_batch_size=int(row["global_batch_size"]) if row["global_batch_size"] else None,
        num_runs=int(row["num_runs"]) if row["num_runs"] else None,
        num_failed=int(row["num_failed"]) if row["num_failed"] else None,
        olympic_minutes=_number(row["olympic_minutes"]),
        rcp_factor=_number(row["rcp_factor"]),
        official_minutes=float(row["official_minutes"]),
        mean_samples=_number(row["mean_samples"]),
        step_time_s=_number(row["step_time_s"]),
    )


def _number(cell: str) -> float | None:
    return float(cell) if cell else None


@cache
def samples_to_target(benchmark: str, global_batch_size: int) -> Convergence | None:
    """Return the published distribution of samples to target; None if nothing was published.

    The runs of submissions if they were counted, else reference runs, else a normal distribution whose mean and
    standard deviation are interpolated between the neighbouring batch sizes with reference runs. Never extrapolated.
    """
    facts = _benchmarks().get(benchmark)
    if facts is None:
        return None
    kinds: tuple[tuple[Kind, str], ...] = (("submissions", "submissions"), ("reference runs", "reference"))
    for kind, name in kinds:
        if counts := facts[name]["counts"].get(str(global_batch_size)):
            num_runs = sum(counts.values())
            shares = tuple((int(samples), count / num_runs) for samples, count in counts.items())
            return _convergence(benchmark, global_batch_size, kind, shares, num_runs)
    return _interpolated(benchmark, global_batch_size)


@cache
def reference_mean(benchmark: str, global_batch_size: int) -> float | None:
    """Return the mean samples to target of the reference runs, interpolated between batch sizes; None outside them.

    As in the official check, pruned points do not count.
    """
    runs = _reference_runs(benchmark)
    sizes = sorted(runs)
    if not sizes or not sizes[0] <= global_batch_size <= sizes[-1]:
        return None
    below = max(size for size in sizes if size <= global_batch_size)
    above = min(size for size in sizes if size >= global_batch_size)
    weight = (global_batch_size - below) / (above - below) if above > below else 0.0
    return (1 - weight) * fmean(runs[below]) + weight * fmean(runs[above])


def schedule(benchmark: str) -> Schedule:
    """Return the evaluation schedule of a benchmark whose samples to target are published."""
    known = BENCHMARKS[benchmark].schedule
    assert known is not None, f"{benchmark} has figures, but no schedule"
    return known


@cache
def _benchmarks() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((DATA / "samples_to_target.json").read_text("utf-8"))
    return facts


def _interpolated(benchmark: str, global_batch_size: int) -> Convergence | None:
    """Return the distribution between two batch sizes; as in the official check, pruned points do not count."""
    runs = _reference_runs(benchmark)
    around = [pair for pair in pairwise(sorted(runs)) if pair[0] < global_batch_size < pair[1]]
    if not around:
        return None
    below, above = around[0]
    weight = (global_batch_size - below) / (above - below)
    mean, stdev = (
        (1 - weight) * statistic(runs[below]) + weight * statistic(runs[above]) for statistic in (fmean, pstdev)
    )
    shares = _normal_shares(benchmark, global_batch_size, mean=mean, stdev=stdev)
    return _convergence(benchmark, global_batch_size, "interpolated", shares, len(runs[below]) + len(runs[above]))


def _reference_runs(benchmark: str) -> dict[int, list[int]]:
    """Return the samples to target of the reference runs by batch size, without pruned points."""
    reference = _benchmarks().get(benchmark, {}).get("reference", {"counts": {}, "pruned": []})
    return {
        int(gbs): [int(samples) for samples, count in counts.items() for _ in range(count)]
        for gbs, counts in reference["counts"].items()
        if int(gbs) not in reference["pruned"]
    }


def _normal_shares(
    benchmark: str, global_batch_size: int, *, mean: float, stdev: float
) -> tuple[tuple[int, float], ...]:
    """Return a normal distribution on the evaluation grid, shifted by the mean delay of half an interval."""
    due = schedule(benchmark)
    interval, first = due.interval(global_batch_size), due.first(global_batch_size)
    reached = NormalDist(mean - interval / 2, stdev).cdf
    grid = range(first, int(mean + _TAIL_STDEVS * stdev) + interval, interval)
    shares = [(at, reached(at) - (reached(at - interval) if at > first else 0)) for at in grid]
    total = sum(share for _, share in shares)
    return tuple((at, share / total) for at, share in shares)


def _convergence(
    benchmark: str, global_batch_size: int, kind: Kind, shares: tuple[tuple[int, float], ...], num_runs: int
) -> Convergence:
    facts = _benchmarks()[benchmark]["submissions" if kind == "submissions" else "reference"]
    return Convergence(
        benchmark=benchmark,
        global_batch_size=global_batch_size,
        kind=kind,
        shares=shares,
        num_runs=num_runs,
        source=facts["source"],
    )
