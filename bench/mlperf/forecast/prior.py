"""The distribution of samples to target before the first evaluation, for a system that has not been seen.

The runs of one system are alike, and systems differ: so each published system of this global batch size (GBS) has the
same weight, however many runs it has. OTHER_SYSTEMS more come from the systems of other batch sizes, whose samples
are scaled by the mean of the reference convergence points; each batch size has the same weight there. They give the
tails that a few systems cannot show.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench.mlperf.published import DATA, reference_mean, systems
from bench.mlperf.system_tables import System

OTHER_SYSTEMS = 2.0
"""The weight of all systems of other batch sizes together, in systems of this batch size. Chosen so that the ranges of
systems that are left out hold what they state, by batch size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedSystem:
    """The runs of one system that reached the target."""

    round: str
    system: str
    """Submitter and system."""
    global_batch_size: int
    interval: int
    """Samples between two evaluations."""
    counts: tuple[tuple[int, int], ...]
    """(samples at the evaluation that reached the target, runs)."""

    @property
    def num_runs(self) -> int:
        return sum(runs for _, runs in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """How many samples a run of a system that has not been seen needs."""

    samples: NDArray[np.float64]
    """At the evaluation that reached the target, one for each published count."""
    intervals: NDArray[np.float64]
    weights: NDArray[np.float64]
    """They add up to 1."""
    num_runs: int
    """Runs of this batch size."""
    num_systems: int

    def reached_by(self, samples: Sequence[float]) -> NDArray[np.float64]:
        """Return the share that reaches the target within so many samples, also between two evaluations.

        A run that reached it at an evaluation did so at any point of the interval before it, with equal probability.
        """
        missing = (self.samples - np.asarray(samples, dtype=float)[:, None]) / self.intervals
        share: NDArray[np.float64] = np.clip(1 - missing, 0, 1) @ self.weights
        return share


@cache
def counted_systems(benchmark: str) -> tuple[PublishedSystem, ...]:
    """Return every published system with its runs' samples to target; empty for a benchmark without them.

    They are in a file of their own, or in the table of systems, which takes precedence.
    """
    table = DATA / f"{benchmark}_samples.json"
    counted = (one for one in systems(benchmark) if one.samples and one.eval_interval and one.global_batch_size)
    listed = tuple(map(_counted, counted))
    if not table.is_file():
        return listed
    names = {(one.round, one.system) for one in listed}
    return listed + tuple(
        PublishedSystem(
            round=row["round"],
            system=row["system"],
            global_batch_size=row["global_batch_size"],
            interval=row["interval"],
            counts=tuple((int(samples), runs) for samples, runs in row["counts"].items()),
        )
        for row in json.loads(table.read_text("utf-8"))["systems"]
        if (row["round"], row["system"]) not in names
    )


def _counted(system: System) -> PublishedSystem:
    assert system.global_batch_size is not None and system.eval_interval is not None
    return PublishedSystem(
        round=system.round,
        system=f"{system.submitter}/{system.system}",
        global_batch_size=system.global_batch_size,
        interval=system.eval_interval,
        counts=system.samples,
    )


def prior(
    benchmark: str, global_batch_size: int, *, without: Callable[[PublishedSystem], bool] = lambda _: False
) -> Prior | None:
    """Return the prior at this batch size; None if the reference mean or all systems are unknown.

    `without` says which systems are left out, to test a forecast on them.
    """
    mean = reference_mean(benchmark, global_batch_size)
    counted = [system for system in counted_systems(benchmark) if not without(system)]
    if mean is None or not counted:
        return None
    own = [system for system in counted if system.global_batch_size == global_batch_size]
    others: dict[int, list[PublishedSystem]] = {}
    for system in counted:
        if system.global_batch_size != global_batch_size and reference_mean(benchmark, system.global_batch_size):
            others.setdefault(system.global_batch_size, []).append(system)
    rows = list(_rows(own, weight=1.0, scale=1.0))
    for gbs, group in others.items():
        scale = mean / (reference_mean(benchmark, gbs) or mean)
        rows += _rows(group, weight=OTHER_SYSTEMS / len(others) / len(group), scale=scale)
    samples, intervals, weights = np.array(rows).T
    return Prior(
        samples=samples,
        intervals=intervals,
        weights=weights / weights.sum(),
        num_runs=sum(system.num_runs for system in own),
        num_systems=len(own),
    )


def _rows(systems: Iterable[PublishedSystem], *, weight: float, scale: float) -> Iterable[tuple[float, float, float]]:
    for system in systems:
        for samples, runs in system.counts:
            yield samples * scale, system.interval * scale, weight * runs / system.num_runs
