"""Forecast when a run reaches its target: a probability for each evaluation, from published runs and its own losses.

Before the first evaluation the forecast is the distribution of published systems (`prior`). Each loss then changes the
probability of three kinds of recipes (`recipes`): one that follows the reference curve, one in low precision that
switches to a higher one near the end, and one that learns slowly. These are exact sums without random numbers.

If no curve is known, the forecast is the distribution of the published runs that had not converged at this number of
samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from bench.mlperf.benchmarks import BENCHMARKS, Goal
from bench.mlperf.forecast.curve import (
    BandPoint,
    Reference,
    band,
    is_outside,
    latest_outside,
    outside_band,
    reference,
)
from bench.mlperf.forecast.recipes import posterior
from bench.mlperf.published import Convergence

__all__ = ["BandPoint", "Chance", "Forecast", "band", "forecast", "latest_outside", "outside_band", "predict"]

RANGE_SHARE = 0.90
"""The range from samples_low to samples_high has at least this probability."""
_ROUNDING = 1e-9
"""A sum that should be 0.9 may fall short by this much."""


@dataclass(frozen=True, slots=True)
class Chance:
    """One future evaluation."""

    samples: float
    probability: float
    """Probability of reaching the target there, and not earlier."""
    cumulative: float
    """Probability of reaching the target there or earlier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """When a run will reach its target, in samples."""

    global_batch_size: int
    chances: tuple[Chance, ...]
    """One for each future evaluation; for a converged run, only the one that reached the target."""
    later: float
    """Probability that no evaluation of the grid reaches the target; with the chances it adds up to 1."""
    samples_low: float | None
    """With samples_high, the shortest range of evaluations with 90 %; None is beyond the grid."""
    samples_median: float | None
    samples_high: float | None
    num_evaluations: int
    """Evaluations of this run that the forecast is based on."""
    num_runs: int
    """Published runs that the forecast is based on; 0 once the run has converged."""
    source: str
    """What the forecast is based on, as text."""


def forecast(
    evaluations: Sequence[tuple[float, float]],
    *,
    benchmark: str | None,
    global_batch_size: int | None,
    target: float | None,
    grid: Sequence[int] | None = None,
) -> Forecast | None:
    """Forecast when a run with these (samples, loss) evaluations reaches its target; None if there is no forecast.

    `grid` is the samples at each evaluation; the default is the rules' grid. The result is None for a benchmark or
    batch size without published runs, for a target other than the official one, and for a run of another model, whose
    last loss is too far from the curve.
    """
    known = reference(benchmark, global_batch_size)
    if known is None or target is None or BENCHMARKS[known.convergence.benchmark].goals != (Goal(target),):
        return None
    return predict(evaluations, known, goal=Goal(target), grid=grid)


def predict(
    evaluations: Sequence[tuple[float, float]],
    known: Reference,
    *,
    goal: Goal,
    grid: Sequence[int] | None = None,
) -> Forecast | None:
    """Return the forecast from the reference; None for another model."""
    for samples, loss in evaluations:
        if goal.is_reached_by(loss):
            certain = _forecast([samples], [1.0, 0.0], known, len(evaluations))
            return replace(certain, num_runs=0, source="this run's evaluation that reached the target")
    past = sorted(dict(evaluations).items())
    done = past[-1][0] if past else -math.inf
    coming = sorted({at for at in (known.grid() if grid is None else grid) if at > done})
    unlike = is_outside(past, known)
    if unlike and _is_another_model(past, known):
        return None
    if known.curve is None or known.prior is None:
        weights = _published(known.convergence, coming, since=done)
    else:
        weights = posterior(past, coming, known, target=goal.value)
    total = sum(weights)
    if not total:
        return None
    result = _forecast(coming, [weight / total for weight in weights], known, len(past))
    if not unlike:
        return result
    return replace(result, source=f"{result.source}; losses outside the reference band, so the forecast is wider")


def _is_another_model(past: Sequence[tuple[float, float]], known: Reference) -> bool:
    """Return whether the last loss is farther from the curve than that of any published run that converged."""
    assert known.curve is not None
    samples, loss = [at for at in past if known.is_on_curve(at[0])][-1]
    return abs(loss - known.curve.loss(known.progress(samples))) > known.curve.farthest_loss


def _published(convergence: Convergence, coming: Sequence[int], *, since: float) -> list[float]:
    """Return the share of published runs that converge at each future evaluation, and at none of them."""
    reached = [convergence.reached_by(since), *map(convergence.reached_by, coming)]
    return [*(now - before for before, now in pairwise(reached)), max(0.0, 1 - reached[-1])]


def _forecast(points: Sequence[float], weights: Sequence[float], known: Reference, num_evaluations: int) -> Forecast:
    """Return the forecast of a probability at each point and, last, beyond all of them."""
    cumulative = [*accumulate(weights)]
    ends: list[float | None] = [*points, None]
    low, high = _shortest_range(cumulative)
    return Forecast(
        global_batch_size=known.convergence.global_batch_size,
        chances=tuple(map(Chance, points, weights, cumulative)),
        later=weights[-1],
        samples_low=ends[low],
        samples_median=ends[next(place for place, reached in enumerate(cumulative) if reached >= 0.5 - _ROUNDING)],
        samples_high=ends[high],
        num_evaluations=num_evaluations,
        num_runs=_num_runs(known),
        source=_source(known, num_evaluations),
    )


def _shortest_range(cumulative: Sequence[float]) -> tuple[int, int]:
    """Return the first and last index of the shortest, then earliest, range with at least RANGE_SHARE."""
    before = [0.0, *cumulative]
    places = range(len(cumulative))
    wide = (
        (last - first, first, last)
        for first in places
        for last in places[first:]
        if cumulative[last] - before[first] >= RANGE_SHARE - _ROUNDING
    )
    _, low, high = min(wide)
    return low, high


def _num_runs(known: Reference) -> int:
    return known.convergence.num_runs if known.prior is None else known.prior.num_runs


def _source(known: Reference, num_evaluations: int) -> str:
    convergence, plural = known.convergence, "" if num_evaluations == 1 else "s"
    place = f"of {convergence.benchmark} at GBS {convergence.global_batch_size}"
    if known.prior is None:
        runs = f"{_num_runs(known):,} published runs {place} ({convergence.kind})"
    elif known.prior.num_systems:
        num_systems = known.prior.num_systems
        systems = f"{num_systems} system{'' if num_systems == 1 else 's'}"
        runs = f"{_num_runs(known):,} published runs {place} ({systems})"
    else:
        runs = f"no published run {place}, but those at other batch sizes"
    own = (
        f"{num_evaluations} evaluation{plural} of this run"
        if known.curve
        else "no loss of this run (no reference curve)"
    )
    return f"{runs}, {own}"
