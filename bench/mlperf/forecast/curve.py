"""The reference curve: the evaluation loss of published runs, and how far single runs differ from it.

Progress is a scale for samples: 0 is the first evaluation by the rules, 1 is the mean samples to target of the
reference convergence points. On this scale runs of all batch sizes are similar. Every run follows the same curve, later
or earlier by its own lag, and each evaluation adds noise:

    loss = limit_loss + drop_loss * exp(-rate * (progress - lag)) + noise

The lag has a Student t distribution with 3 degrees of freedom, because a few recipes are far slower than the rest. The
noise has a logistic distribution, because single evaluations can be far from the curve. For a given lag the evaluations
are independent of each other, so every probability is a sum over lags.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench.mlperf.forecast.prior import Prior, prior
from bench.mlperf.published import DATA, Convergence, reference_mean, samples_to_target, schedule

BAND_SHARE = 0.99
"""Share of the evaluations of runs like the published ones that are inside the reference band."""
Array = NDArray[np.float64]
_FARTHEST_PROGRESS = (-2.0, 20.0)
"""The limits of the curve; only a damaged log is beyond."""
_GRID_MEANS = 3
"""The grid of the rules ends at this multiple of the published mean of samples to target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The fitted parameters: losses in nats, lag_scale in progress, rate per progress."""

    limit_loss: float
    drop_loss: float
    rate: float
    lag_scale: float
    noise_scale: float
    source: str
    from_progress: float = -math.inf
    """Earlier evaluations are not on the curve, and say little of the end."""
    lag_step: float = 0.025
    """The distance of two lags in a sum, in progress."""
    spike_nats: float = 0.01
    """Mean height of the few evaluations that are far above the others of their run."""
    trust: float = 0.8
    """The exponent of the density of usual noise, below 1 because it depends on that of the evaluation before."""
    farthest_loss: float = 0.30
    """A run outside the band whose last loss is farther from the curve than this, in nats, is of another model. For
    llama2_70b_lora in rounds v4.0 to v5.1, the farthest such run that converged was 0.279 above it (1.2184 at 1,536
    samples; target at 3,456)."""
    has_switching: bool = True
    """Whether published recipes switch to a higher precision near the end."""

    @property
    def lags(self) -> Array:
        """The lags of a sum, from -1 to 4, in progress. The slowest published recipe is 2.3 behind the reference."""
        steps_per_progress = round(1 / self.lag_step)
        lags: Array = np.arange(-steps_per_progress, 4 * steps_per_progress + 1) / steps_per_progress
        return lags

    def loss(self, progress: float) -> float:
        """Return the loss of a run with no lag, without noise."""
        return self.limit_loss + self.drop_loss * math.exp(-self.rate * progress)

    def losses(self, progress: Array, *, lags: Array, stretch: float = 1.0) -> Array:
        """Return the loss without noise: a row for each progress, a column for each lag.

        A stretch below 1 is a run that falls that much more slowly than the reference.
        """
        late = stretch * progress[:, None] - lags
        losses: Array = self.limit_loss + self.drop_loss * np.exp(-self.rate * late)
        return losses

    def below(self, noise: Array) -> Array:
        """Return the probability that the noise of an evaluation is lower."""
        from scipy.special import expit

        probability: Array = expit(noise / self.noise_scale)
        return probability


@dataclass(frozen=True, slots=True)
class Reference:
    """Published data of a benchmark at one global batch size."""

    convergence: Convergence
    curve: Curve | None
    prior: Prior | None
    """None without published runs by system; then the forecast starts from `convergence`."""

    @property
    def first(self) -> int:
        """Samples at the first evaluation by the rules."""
        return schedule(self.convergence.benchmark).first(self.convergence.global_batch_size)

    def grid(self) -> range:
        """Return the samples at each evaluation by the rules."""
        interval = schedule(self.convergence.benchmark).interval(self.convergence.global_batch_size)
        return range(self.first, int(_GRID_MEANS * self.convergence.mean_samples), interval)

    def progress(self, samples: float) -> float:
        low, high = _FARTHEST_PROGRESS
        mean = reference_mean(self.convergence.benchmark, self.convergence.global_batch_size)
        return min(high, max(low, (samples - self.first) / ((mean or self.convergence.mean_samples) - self.first)))

    def is_on_curve(self, samples: float) -> bool:
        """Return whether the reference curve covers an evaluation; False without a curve."""
        return self.curve is not None and self.progress(samples) >= self.curve.from_progress


@dataclass(frozen=True, slots=True)
class BandPoint:
    """The losses that enclose 99 % of the evaluations of runs like the published ones, at a number of samples."""

    samples: int
    low: float
    high: float


@cache
def reference(benchmark: str | None, global_batch_size: int | None) -> Reference | None:
    """Return the published data of a benchmark at this batch size; None without any."""
    if benchmark is None or global_batch_size is None:
        return None
    convergence = samples_to_target(benchmark, global_batch_size)
    if convergence is None:
        return None
    return Reference(convergence, fitted_curve(benchmark), prior(benchmark, global_batch_size))


def fitted_curve(benchmark: str) -> Curve | None:
    """Return the shipped curve of a benchmark; None without one."""
    fitted = DATA / f"{benchmark}_curve.json"
    return Curve(**json.loads(fitted.read_text("utf-8"))) if fitted.is_file() else None


def lag_weights(lags: Array, *, scale: float) -> Array:
    """Return the probability of each lag: the Student t density with 3 degrees of freedom, scaled to add up to 1."""
    densities: Array = (1 + (lags / scale) ** 2 / 3) ** -2
    weights: Array = densities / densities.sum()
    return weights


@cache
def band(benchmark: str | None, global_batch_size: int | None) -> tuple[BandPoint, ...]:
    """Return the band at each evaluation by the rules, up to the last published one; empty if none is known."""
    known = reference(benchmark, global_batch_size)
    if known is None or known.curve is None:
        return ()
    last = known.convergence.shares[-1][0]
    return tuple(_band_point(at, known, known.curve) for at in known.grid() if at <= last and known.is_on_curve(at))


def outside_band(
    evaluations: Sequence[tuple[float, float]], *, benchmark: str | None, global_batch_size: int | None
) -> bool:
    """Return whether most evaluations are outside the band, not only single spikes. False if no band is known."""
    known = reference(benchmark, global_batch_size)
    return known is not None and is_outside(evaluations, known)


def is_outside(evaluations: Sequence[tuple[float, float]], known: Reference) -> bool:
    """Return whether most evaluations are outside the reference band; False if no band is known."""
    curve = known.curve
    if curve is None:
        return False
    on_curve = [(samples, loss) for samples, loss in evaluations if known.is_on_curve(samples)]
    return 2 * sum(_is_point_outside(samples, loss, known, curve) for samples, loss in on_curve) > len(on_curve)


def latest_outside(
    evaluations: Sequence[tuple[float, float]], *, benchmark: str | None, global_batch_size: int | None
) -> tuple[float, BandPoint] | None:
    """Return the latest loss outside the band, and the band there; None unless most evaluations are outside."""
    known = reference(benchmark, global_batch_size)
    if known is None or known.curve is None or not is_outside(evaluations, known):
        return None
    on_curve = (at for at in reversed(evaluations) if known.is_on_curve(at[0]))
    outside = (at for at in on_curve if _is_point_outside(*at, known, known.curve))
    samples, loss = next(outside)
    return loss, _band_point(int(samples), known, known.curve)


def _is_point_outside(samples: float, loss: float, known: Reference, curve: Curve) -> bool:
    tail = (1 - BAND_SHARE) / 2
    return not tail <= _share_below(loss, samples, known, curve) <= 1 - tail


def _band_point(samples: int, known: Reference, curve: Curve) -> BandPoint:
    tail = (1 - BAND_SHARE) / 2
    low, high = (_loss_above(share, samples, known, curve) for share in (tail, 1 - tail))
    return BandPoint(samples, low, high)


def _share_below(loss: float, samples: float, known: Reference, curve: Curve) -> float:
    """Return the share of runs whose loss is lower at this number of samples."""
    losses = curve.losses(np.array([known.progress(samples)]), lags=curve.lags)[0]
    return float(curve.below(loss - losses) @ lag_weights(curve.lags, scale=curve.lag_scale))


def _loss_above(share: float, samples: int, known: Reference, curve: Curve) -> float:
    """Return the loss below which this share of runs is, by bisection to 1e-6."""
    low, high = 0.0, 2 * float(curve.losses(np.array([known.progress(samples)]), lags=curve.lags).max())
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _share_below(middle, samples, known, curve) < share else (low, middle)
    return high
