"""When a run will reach its target: the chance at each coming evaluation, from published runs and the run's own losses.

`bench.mlperf.forecast.curve` says how likely each lag behind the reference curve is, given the losses so far, and for each lag where
the target is likely reached: exact sums, no random numbers. They are then weighted so that before the first
evaluation they are the published distribution, in which the model counts as one run more. Outside the reference band the
two are mixed, more and more of the curve with each evaluation; where no curve is known, the forecast is the published distribution of the runs that had not
converged by now either.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from bench.mlperf.benchmarks import BENCHMARKS, Goal
from bench.mlperf.forecast.curve import (
    LAGS,
    BandPoint,
    Curve,
    Reference,
    band,
    is_outside,
    lag_weights,
    outside_band,
    reference,
)
from bench.mlperf.published import Convergence

__all__ = ["BandPoint", "Chance", "Forecast", "band", "forecast", "outside_band", "predict"]

RANGE_SHARE = 0.90
"""Probability that samples_low to samples_high holds at least."""
FARTHEST_LOSS = 0.05
"""Nats from the curve; of the published runs outside the band, the farthest one lies 0.044 above it."""
_ROUNDING = 1e-9
"""So that a sum that is to be 0.9 counts as 0.9."""


@dataclass(frozen=True, slots=True)
class Chance:
    """One coming evaluation."""

    samples: float
    probability: float
    """That the run reaches its target there, and not before."""
    cumulative: float
    """That it has reached its target by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """When a run will reach its target, in samples."""

    global_batch_size: int
    chances: tuple[Chance, ...]
    """For each coming evaluation; for a run that has converged, the one that reached the target."""
    later: float
    """Probability that no evaluation of the grid reaches the target; with the chances it adds up to 1."""
    samples_low: float | None
    """With samples_high the shortest range of evaluations that holds 90 %; None: beyond the grid."""
    samples_median: float | None
    samples_high: float | None
    num_evaluations: int
    """Evaluations of this run that it is based on."""
    num_runs: int
    """Published runs that it is based on; 0 once the run has converged."""
    source: str
    """All that in words."""


def forecast(
    evaluations: Sequence[tuple[float, float]],
    *,
    benchmark: str | None,
    global_batch_size: int | None,
    target: float | None,
    grid: Sequence[int] | None = None,
) -> Forecast | None:
    """Return when a run with these (samples, loss) evaluations reaches its target; None where nothing can be said.

    Without a `grid` (samples at each evaluation) the one of the rules applies. None is for a benchmark or batch size
    without published runs, another target than the official one, and a run whose losses no published run came near: it
    is another model. `outside_band` tells of runs that are near, and still unlike those that the curve was fitted on.
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
    """Return the forecast from what is known; None for another model."""
    for samples, loss in evaluations:
        if goal.is_reached_by(loss):
            certain = _forecast([samples], [1.0, 0.0], known, len(evaluations))
            return replace(certain, num_runs=0, source="this run's evaluation that reached the target")
    past = sorted(dict(evaluations).items())
    done = past[-1][0] if past else -math.inf
    coming = sorted({at for at in (known.grid() if grid is None else grid) if at > done})
    weights = _published(known.convergence, coming, since=done)
    unlike = is_outside(past, known)
    if unlike and _is_another_model(past, known):
        return None
    if known.curve is not None:
        without, given = _model(known, past, coming, target=goal.value)
        if unlike:
            weights = _mixed(weights, given, num_evaluations=len(past))
        else:
            weights = _weigh(weights, without, given, num_runs=known.convergence.num_runs)
    total = sum(weights)
    if not total:
        return None
    made = _forecast(coming, [weight / total for weight in weights], known, len(past))
    return (
        replace(made, source=f"{made.source}, outside their band: a slow recipe or one that catches up")
        if unlike
        else made
    )


def _mixed(published: Sequence[float], given: Sequence[float], *, num_evaluations: int) -> list[float]:
    """Return two ways to go on: as published runs do from here, or along the curve, as late as it is now.

    Of the published runs outside the band, recipes that switch precision did the one and slow ones the other; with each
    evaluation that stays outside, catching up is less likely.
    """
    totals = [sum(weights) or 1.0 for weights in (published, given)]
    return [one / totals[0] + num_evaluations * other / totals[1] for one, other in zip(published, given, strict=True)]


def _is_another_model(past: Sequence[tuple[float, float]], known: Reference) -> bool:
    """Return whether the last loss lies farther from the curve than that of any published run."""
    assert known.curve is not None
    samples, loss = past[-1]
    return abs(loss - known.curve.loss(known.progress(samples), 0)) > FARTHEST_LOSS


def _published(convergence: Convergence, coming: Sequence[int], *, since: float) -> list[float]:
    """Return the share of published runs that converge at each coming evaluation, and at none of them."""
    reached = [convergence.reached_by(since), *map(convergence.reached_by, coming)]
    return [*(now - before for before, now in pairwise(reached)), max(0.0, 1 - reached[-1])]


def _weigh(
    published: Sequence[float], without: Sequence[float], given: Sequence[float], *, num_runs: int
) -> list[float]:
    """Return the model's weights given the losses, with the published distribution in place of its own without them."""
    return [
        weight * (num_runs * share / before + 1) if before else 0.0
        for share, before, weight in zip(published, without, given, strict=True)
    ]


def _model(
    known: Reference, past: Sequence[tuple[float, float]], coming: Sequence[int], *, target: float
) -> tuple[list[float], list[float]]:
    """Return the weight of converging at each coming evaluation and at none: without and given the past losses."""
    curve = known.curve
    assert curve is not None
    seen, ahead = [known.progress(at) for at, _ in past], [known.progress(at) for at in coming]
    likelihoods = _likelihoods(curve, [(at, loss) for at, (_, loss) in zip(seen, past, strict=True)])
    without, given = [0.0] * (len(coming) + 1), [0.0] * (len(coming) + 1)
    for lag, prior, likelihood in zip(LAGS, lag_weights(curve.lag_scale), likelihoods, strict=True):
        missed = math.prod(1 - curve.below(target - curve.loss(at, lag)) for at in seen)
        first = _first_reached([curve.below(target - curve.loss(at, lag)) for at in ahead])
        for place, probability in enumerate(first):
            without[place] += prior * missed * probability
            given[place] += prior * likelihood * probability
    return without, given


def _likelihoods(curve: Curve, seen: Sequence[tuple[float, float]]) -> list[float]:
    """Return how likely each lag makes the losses; the likeliest is 1."""
    logs = [sum(curve.log_density(loss - curve.loss(at, lag)) for at, loss in seen) for lag in LAGS]
    return [math.exp(log - max(logs)) for log in logs]


def _first_reached(chances: Sequence[float]) -> list[float]:
    """Return how likely each of independent evaluations is the first to reach the target, and that none does."""
    missed = [*accumulate((1 - chance for chance in chances), operator.mul, initial=1.0)]
    return [*map(operator.mul, missed, chances), missed[-1]]


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
        num_runs=known.convergence.num_runs,
        source=_source(known, num_evaluations),
    )


def _shortest_range(cumulative: Sequence[float]) -> tuple[int, int]:
    """Return the first and last place of the shortest, then earliest, range that holds RANGE_SHARE."""
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


def _source(known: Reference, num_evaluations: int) -> str:
    convergence, plural = known.convergence, "" if num_evaluations == 1 else "s"
    runs = f"{convergence.num_runs:,} published runs of {convergence.benchmark} at GBS {convergence.global_batch_size}"
    own = (
        f"{num_evaluations} evaluation{plural} of this run" if known.curve else "no loss of this run: no curve is known"
    )
    return f"{runs} ({convergence.kind}), {own}"
