"""Published figures of MLPerf Training as data: systems with their scores, and how many samples their runs needed.

All data is from the public result rounds and is in `data/` next to this file. Each file names its source.
"""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from statistics import NormalDist, fmean, pstdev
from typing import Any, Literal

from bench.mlperf import system_tables
from bench.mlperf.benchmarks import BENCHMARKS, Schedule
from bench.mlperf.system_tables import System

DATA = files("bench.mlperf") / "data"
_TAIL_STDEVS = 4
"""An interpolated distribution ends this many standard deviations above its mean."""

FEWEST_SYSTEMS = 3
"""Published systems of a batch size whose runs are used for those of a new system; below, the reference's runs do."""
Kind = Literal["submissions", "reference runs", "interpolated"]


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


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """Time to evaluate a row / time to train on a row: the median of published runs, and 5 and 95 % quantile."""

    typical: float
    low: float
    high: float


_WITH_LORA, _WITHOUT_LORA = EvaluationRow(0.45, 0.39, 1.10), EvaluationRow(0.31, 0.24, 0.41)
"""Without LoRA, training also computes the gradients of all weights. In 844 published llama2_70b_lora runs the median
and the quantiles are 0.46, 0.40 and 1.11 for the first evaluation, and 0.45, 0.39 and 0.82 for the later ones; in 390
published llama31_8b runs 0.31, 0.24 and 0.41, and 0.30, 0.24 and 0.32."""


def evaluation_row(*, has_lora: bool) -> EvaluationRow:
    """Return the time to evaluate a row, as a share of the time to train on a row."""
    return _WITH_LORA if has_lora else _WITHOUT_LORA


@cache
def systems(benchmark: str = "llama2_70b_lora") -> tuple[System, ...]:
    """Return every published system, by round; empty for a benchmark without data here.

    A system of the user's own tables replaces the shipped one of the same round, submitter and name.

    Raises:
        ConfigError: one of the user's own tables is damaged.
    """
    if benchmark not in _benchmarks():
        return ()
    table = DATA / f"{benchmark}.csv"
    shipped = system_tables.read(table, benchmark=benchmark) if table.is_file() else iter(())
    own = {
        (system.round, system.submitter, system.system): system
        for table in system_tables.own_tables()
        for system in system_tables.read(table, benchmark=benchmark)
    }
    return (*(each for each in shipped if (each.round, each.submitter, each.system) not in own), *own.values())


@cache
def samples_to_target(benchmark: str, global_batch_size: int) -> Convergence | None:
    """Return the published distribution of samples to target; None if nothing was published.

    The runs of submissions if they were counted, else reference runs, else a normal distribution whose mean and
    standard deviation are interpolated between the neighbouring batch sizes with reference runs. Never extrapolated.
    """
    facts = _benchmarks().get(benchmark)
    if facts is None:
        return None
    if (listed := _listed(benchmark, global_batch_size)) is not None:
        return listed
    kinds: tuple[tuple[Kind, str], ...] = (("submissions", "submissions"), ("reference runs", "reference"))
    for kind, name in kinds:
        if counts := facts[name]["counts"].get(str(global_batch_size)):
            num_runs = sum(counts.values())
            shares = tuple((int(samples), count / num_runs) for samples, count in counts.items())
            return _convergence(benchmark, global_batch_size, kind, shares, num_runs)
    return _interpolated(benchmark, global_batch_size)


def _listed(benchmark: str, global_batch_size: int) -> Convergence | None:
    """Return the runs that the tables of systems list; None of fewer than FEWEST_SYSTEMS."""
    listed = [one for one in systems(benchmark) if one.samples and one.global_batch_size == global_batch_size]
    if len(listed) < FEWEST_SYSTEMS:
        return None
    counts: Counter[int] = Counter()
    for system in listed:
        counts.update(dict(system.samples))
    num_runs = counts.total()
    return Convergence(
        benchmark=benchmark,
        global_batch_size=global_batch_size,
        kind="submissions",
        shares=tuple((samples, counts[samples] / num_runs) for samples in sorted(counts)),
        num_runs=num_runs,
        source=f"MLCommons training results {', '.join(sorted({one.round for one in listed}))}, from the logs",
    )


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
