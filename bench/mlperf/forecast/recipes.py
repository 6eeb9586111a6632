"""The probability of converging at each future evaluation, given the losses so far, for three kinds of recipes.

- *Usual*: the loss follows the reference curve, later or earlier by a lag.
- *Switching*: the loss is above such a curve by an offset until the recipe switches from FP4 to a higher precision.
- *Slow*: the loss falls much later, or more slowly, than the reference.

Usual and switching recipes converge when published systems do: the model says how likely the losses are if the target
is reached at an evaluation, and the published distribution how likely that evaluation is. Slow recipes are so
different from one another that the model alone says when they converge, mixed with a distribution that knows nothing.

The noise of a model that is only roughly right is not independent from one evaluation to the next; so the logarithm of
its density counts by less than 1 (`trust`). A few evaluations lie far above the others of their run (`SPIKE_SHARE`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from bench.mlperf.forecast.curve import Array, Curve, Reference, lag_weights

SPIKE_SHARE = 0.02
"""Share of evaluations that are spikes."""
UNKNOWN_EVALUATIONS = 2
"""In the distribution that knows nothing a run needs, after n evaluations, n + 2 more with probability one half."""
UNKNOWN_SHARE = 0.15
"""Its share in the forecast of slow recipes."""
UNRELATED_SHARE = 0.01
"""Probability that the losses say nothing of a run's end."""
_LEAST = 1e-250
"""A smaller probability is zero: it has no ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRecipe:
    """Runs of one kind: a curve for each column of lags."""

    share: float
    """Share of the published systems, roughly."""
    follows_published: bool
    """Whether published systems say when it converges."""
    lags: Array
    weights: Array
    """The probability of each column."""
    stretch: float = 1.0
    offsets: Array | float = 0.0
    """Nats above the curve before the switch."""
    switches: Array | float = 0.0
    """Progress at the switch."""
    noise: float
    """Scale of the noise, relative to that of the reference curve."""
    trust: float

    def losses(self, progress: Array, curve: Curve) -> Array:
        """Return the loss without noise: a row for each progress, a column for each of `lags`."""
        losses = curve.losses(progress, lags=self.lags, stretch=self.stretch)
        return losses + self.offsets * (progress[:, None] < self.switches)

    def log_densities(self, noise: Array, curve: Curve) -> Array:
        """Return the logarithm of the likelihood of all evaluations of a column, from noise in nats."""
        total: Array = log_densities(noise, curve, scale=self.noise, trust=self.trust).sum(axis=0)
        return total

    def below(self, noise: Array, curve: Curve) -> Array:
        """Return the probability that the noise of an evaluation is lower."""
        return curve.below(noise / self.noise)


def log_densities(noise: Array, curve: Curve, *, scale: float = 1.0, trust: float = 1.0) -> Array:
    """Return the logarithm of the density of each evaluation, which may be a spike, from its noise in nats.

    scale is relative to the noise of the curve.
    """
    from scipy.special import log_expit

    width = scale * curve.noise_scale
    usual = trust * (log_expit(noise / width) + log_expit(-noise / width)) - math.log(width)
    spike = np.where(noise > 0, -trust * noise / curve.spike_nats - math.log(curve.spike_nats), -np.inf)
    densities: Array = np.logaddexp(math.log(1 - SPIKE_SHARE) + usual, math.log(SPIKE_SHARE) + spike)
    return densities


@cache
def recipes(curve: Curve) -> tuple[CurveRecipe, ...]:
    """Return the kinds of recipes of a benchmark with this curve."""
    lags = curve.lags
    usual = CurveRecipe(
        share=0.90,
        follows_published=True,
        lags=lags,
        weights=lag_weights(lags, scale=curve.lag_scale),
        noise=1.0,
        trust=curve.trust,
    )
    slow_lags = np.arange(-2, 101) / 20
    slow = (
        CurveRecipe(
            share=share,
            follows_published=False,
            lags=slow_lags,
            weights=lag_weights(slow_lags, scale=0.4),
            stretch=stretch,
            noise=2.5,
            trust=0.5,
        )
        for stretch, share in ((1.0, 0.016), (0.75, 0.012), (0.5, 0.012))
    )
    return (usual, *([_switching()] if curve.has_switching else []), *slow)


def _switching() -> CurveRecipe:
    """Return the recipes that switch: all combinations of lag, offset and switch.

    Six published systems (v5.1, GBS 8) were 0.012 to 0.024 above the curve and switched between 2,688 and 3,072
    samples: progress 0.70 to 0.94.
    """
    lags, offsets = np.arange(-6, 25) / 20, np.array([0.005, 0.008, 0.012, 0.016, 0.021, 0.027, 0.035])
    switches, of_switches = np.array(
        [(0.2, 0.03), (0.45, 0.05), (0.82, 0.70), (1.05, 0.10), (1.3, 0.06), (1.7, 0.03), (2.5, 0.03)]
    ).T
    of_offsets = np.exp(-0.5 * (np.log(offsets / 0.016) / 0.6) ** 2)
    columns = [column.ravel() for column in np.meshgrid(lags, offsets, switches, indexing="ij")]
    weights = np.einsum("i,j,k->ijk", lag_weights(lags, scale=0.12), of_offsets / of_offsets.sum(), of_switches)
    return CurveRecipe(
        share=0.06,
        follows_published=True,
        lags=columns[0],
        offsets=columns[1],
        switches=columns[2],
        weights=weights.ravel(),
        noise=2.0,
        trust=0.5,
    )


def posterior(
    past: Sequence[tuple[float, float]], coming: Sequence[int], known: Reference, *, target: float
) -> list[float]:
    """Return the probability of reaching the target at each future evaluation and, last, at none.

    `past` is (samples, loss) of the evaluations so far, none of which reached the target.
    """
    curve, prior = known.curve, known.prior
    assert curve is not None and prior is not None
    reached = prior.reached_by([past[-1][0] if past else -math.inf, *coming])
    left = 1 - float(reached[0])
    published = np.append(np.diff(reached), 1 - reached[-1])
    unknown = _unknown(len(coming), num_evaluations=len(past))
    published = published / left if left > _LEAST else unknown
    without, given, slow = _likelihoods(past, coming, known, target=target)
    ratios = np.divide(given, without, out=np.zeros_like(given), where=without > _LEAST)
    like_published, is_slow = left * float(published @ ratios), float(slow.sum())
    total = like_published + is_slow
    if not total > 0:
        return [float(share) for share in published]
    slow = (1 - UNKNOWN_SHARE) * slow + UNKNOWN_SHARE * is_slow * unknown
    weights = (left * published * ratios + slow) / total
    return [float(share) for share in (1 - UNRELATED_SHARE) * weights + UNRELATED_SHARE * published]


def _likelihoods(
    past: Sequence[tuple[float, float]], coming: Sequence[int], known: Reference, *, target: float
) -> tuple[Array, Array, Array]:
    """Return, for each future evaluation and none, the probability of converging there: without and with the losses.

    The first two are of recipes that converge when published systems do, the third is of slow ones with the losses.
    """
    curve = known.curve
    assert curve is not None
    kinds = recipes(curve)
    past = [(at, loss) for at, loss in past if known.is_on_curve(at)]
    seen, ahead = (np.array([known.progress(at) for at in points]) for points in ([at for at, _ in past], coming))
    losses = np.array([loss for _, loss in past])[:, None]
    means = [kind.losses(seen, curve) for kind in kinds]
    fits = [kind.log_densities(losses - mean, curve) for kind, mean in zip(kinds, means, strict=True)]
    likeliest = max(float(fit.max()) for fit in fits)
    without, given, slow = (np.zeros(len(coming) + 1) for _ in range(3))
    for kind, mean, fit in zip(kinds, means, fits, strict=True):
        missed = (1 - kind.below(target - mean, curve)).prod(axis=0)
        first = _first_reached(kind.below(target - kind.losses(ahead, curve), curve))
        with_losses = kind.share * (first @ (kind.weights * np.exp(fit - likeliest)))
        if kind.follows_published:
            without += kind.share * (first @ (kind.weights * missed))
            given += with_losses
        else:
            slow += with_losses
    return without, given, slow


def _unknown(num_coming: int, *, num_evaluations: int) -> Array:
    """Return the distribution that knows only how many evaluations a run has had."""
    by_then = [place / (place + num_evaluations + UNKNOWN_EVALUATIONS) for place in range(num_coming + 1)]
    return np.array([*(now - before for before, now in pairwise(by_then)), 1 - by_then[-1]])


def _first_reached(chances: Array) -> Array:
    """Return the probability that each of independent evaluations is the first to reach the target and, last, that none
    does."""
    missed = np.vstack([np.ones((1, chances.shape[1])), (1 - chances).cumprod(axis=0)])
    return np.vstack([missed[:-1] * chances, missed[-1:]])
