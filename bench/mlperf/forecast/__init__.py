"""Forecast when a run reaches its target: a probability for each evaluation, from published runs and its own losses.

`bench.mlperf.forecast.curve` computes, from the losses so far, the probability of each lag behind the reference curve,
and for each lag the probability of reaching the target at each evaluation. These are exact sums without random numbers.
The result is weighted so that before the first evaluation it equals the published distribution.

If the losses of a run are outside the reference band, the forecast is a mixture of three models: the published runs, a
curve of its own, and an uninformed distribution. If no curve is known, the forecast is the distribution of the
published runs that had not converged at this number of samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from bench.mlperf.benchmarks import BENCHMARKS, Goal
from bench.mlperf.forecast.curve import (
    Array,
    BandPoint,
    Reference,
    band,
    is_outside,
    lag_weights,
    latest_outside,
    outside_band,
    reference,
)
from bench.mlperf.published import Convergence

__all__ = ["BandPoint", "Chance", "Forecast", "band", "forecast", "latest_outside", "outside_band", "predict"]

RANGE_SHARE = 0.90
"""The range from samples_low to samples_high has at least this probability."""
FARTHEST_LOSS = 0.30
"""A run outside the band whose last loss is farther from the curve than this, in nats, is of another model. In rounds
v4.0 to v5.1 the farthest such run that converged was 0.279 above it (1.2184 at 1,536 samples; target at 3,456)."""
STRETCHES = (1.0, 0.75, 0.5)
"""How fast the loss of a run outside the band may fall, relative to the reference: slow published runs fall more
slowly."""
UNKNOWN_EVALUATIONS = 2
"""In the uninformed distribution a run needs, after n evaluations, n + 2 more with a probability of one half."""
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
    last loss is farther from the curve than FARTHEST_LOSS.
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
    weights = _published(known.convergence, coming, since=done)
    unlike = is_outside(past, known)
    if unlike and _is_another_model(past, known):
        return None
    if known.curve is not None:
        if unlike:
            _, given = _model(known, past, coming, target=goal.value, stretches=STRETCHES)
            weights = _mixed(weights, given, num_evaluations=len(past))
        else:
            without, given = _model(known, past, coming, target=goal.value)
            weights = _weigh(weights, without, given, num_runs=known.convergence.num_runs)
    total = sum(weights)
    if not total:
        return None
    result = _forecast(coming, [weight / total for weight in weights], known, len(past))
    if not unlike:
        return result
    return replace(result, source=f"{result.source}; losses outside the reference band, so the forecast is wider")


def _mixed(published: Sequence[float], given: Sequence[float], *, num_evaluations: int) -> list[float]:
    """Return a mixture of three models: the published runs, a curve of its own, and an uninformed distribution.

    Recipes that switch to a higher precision near the end follow the first, slow recipes the second. The weight of the
    second grows with each evaluation. The third covers recipes that differ from all published ones.
    """
    by_then = [place / (place + num_evaluations + UNKNOWN_EVALUATIONS) for place in range(len(published))]
    unknown = [*(now - before for before, now in pairwise(by_then)), 1 - by_then[-1]]
    models = ((1, published), (num_evaluations, given), (1, unknown))
    scaled = [[weight * share / (sum(shares) or 1.0) for share in shares] for weight, shares in models]
    return [sum(column) for column in zip(*scaled, strict=True)]


def _is_another_model(past: Sequence[tuple[float, float]], known: Reference) -> bool:
    """Return whether the last loss is farther from the curve than that of any published run that converged."""
    assert known.curve is not None
    samples, loss = past[-1]
    return abs(loss - known.curve.loss(known.progress(samples))) > FARTHEST_LOSS


def _published(convergence: Convergence, coming: Sequence[int], *, since: float) -> list[float]:
    """Return the share of published runs that converge at each future evaluation, and at none of them."""
    reached = [convergence.reached_by(since), *map(convergence.reached_by, coming)]
    return [*(now - before for before, now in pairwise(reached)), max(0.0, 1 - reached[-1])]


def _weigh(
    published: Sequence[float], without: Sequence[float], given: Sequence[float], *, num_runs: int
) -> list[float]:
    """Return the model's weights given the losses, scaled so that without losses they are the published distribution.

    The model itself counts as one more published run.
    """
    return [
        weight * (num_runs * share / before + 1) if before else 0.0
        for share, before, weight in zip(published, without, given, strict=True)
    ]


def _model(
    known: Reference,
    past: Sequence[tuple[float, float]],
    coming: Sequence[int],
    *,
    target: float,
    stretches: Sequence[float] = (1.0,),
) -> tuple[list[float], list[float]]:
    """Return the weight of converging at each future evaluation and, last, at none: without and given the past
    losses."""
    curve = known.curve
    assert curve is not None
    seen, ahead = (np.array([known.progress(at) for at in points]) for points in ([at for at, _ in past], coming))
    losses, prior = np.array([loss for _, loss in past])[:, None], lag_weights(curve.lag_scale)
    without = given = np.zeros(len(coming) + 1)
    fits = [curve.log_density(losses - curve.losses(seen, stretch=stretch)).sum(axis=0) for stretch in stretches]
    likeliest = max(float(fit.max()) for fit in fits)
    for stretch, fit in zip(stretches, fits, strict=True):
        missed = (1 - curve.below(target - curve.losses(seen, stretch=stretch))).prod(axis=0)
        first = _first_reached(curve.below(target - curve.losses(ahead, stretch=stretch)))
        without = without + first @ (prior * missed)
        given = given + first @ (prior * np.exp(fit - likeliest))
    return without.tolist(), given.tolist()


def _first_reached(chances: Array) -> Array:
    """Return the probability that each of independent evaluations is the first to reach the target and, last, that none
    does."""
    missed = np.vstack([np.ones((1, chances.shape[1])), (1 - chances).cumprod(axis=0)])
    return np.vstack([missed[:-1] * chances, missed[-1:]])


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


def _source(known: Reference, num_evaluations: int) -> str:
    convergence, plural = known.convergence, "" if num_evaluations == 1 else "s"
    runs = f"{convergence.num_runs:,} published runs of {convergence.benchmark} at GBS {convergence.global_batch_size}"
    own = (
        f"{num_evaluations} evaluation{plural} of this run"
        if known.curve
        else "no loss of this run (no reference curve)"
    )
    return f"{runs} ({convergence.kind}), {own}"
