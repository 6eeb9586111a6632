"""The reference curve: how the evaluation loss of published runs falls, and how far runs differ from it.

Progress is samples on a scale where the first evaluation by the rules is 0 and the published mean of samples to target
is 1; on it, runs of all batch sizes look alike. Every run follows one curve, late by a lag of its own, and evaluations
are noisy:

    loss = limit_loss + drop_loss * exp(-rate * (progress - lag)) + noise

The lag has a Student t distribution with 3 degrees of freedom, as a few recipes are far slower than the rest; the noise
a logistic one, as spikes happen. For a given lag the evaluations are independent, so probabilities are sums over lags.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from bench.mlperf.published import DATA, Convergence, samples_to_target, schedule

BAND_SHARE = 0.99
"""Share of the evaluations of runs like the published ones that lie inside the reference band."""
LAGS = tuple(n / 40 for n in range(-40, 161))
"""Wide enough for the slowest published recipe, 2.3 behind the reference."""
_FARTHEST_PROGRESS = (-2.0, 20.0)
"""Where the curve is cut off; only a damaged log lies beyond."""
_GRID_MEANS = 3
"""How many published means of samples to target the grid by the rules is followed."""
_MAX_EXPONENT = 700.0
"""What math.exp can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The fitted parameters: losses in nats, lag_scale in progress, rate per progress."""

    limit_loss: float
    drop_loss: float
    rate: float
    lag_scale: float
    noise_scale: float
    source: str

    def loss(self, progress: float, lag: float) -> float:
        return self.limit_loss + self.drop_loss * math.exp(-self.rate * (progress - lag))

    def below(self, noise: float) -> float:
        """Return the probability that an evaluation's noise lies below."""
        return 1 / (1 + math.exp(min(-noise / self.noise_scale, _MAX_EXPONENT)))

    def log_density(self, noise: float) -> float:
        """Return the logarithm of the density of an evaluation's noise, less a constant."""
        scaled = abs(noise) / self.noise_scale
        return -scaled - 2 * math.log1p(math.exp(-scaled))


@dataclass(frozen=True, slots=True)
class Reference:
    """What is known of a benchmark at one global batch size before a run starts."""

    convergence: Convergence
    curve: Curve | None

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
        return min(high, max(low, (samples - self.first) / (self.convergence.mean_samples - self.first)))


@dataclass(frozen=True, slots=True)
class BandPoint:
    """Where the evaluation loss of a run like the published ones lies."""

    samples: int
    low: float
    high: float


@cache
def reference(benchmark: str | None, global_batch_size: int | None) -> Reference | None:
    """Return what is known of a benchmark at this batch size; None where nothing published says."""
    if benchmark is None or global_batch_size is None:
        return None
    convergence = samples_to_target(benchmark, global_batch_size)
    if convergence is None:
        return None
    fitted = DATA / f"{benchmark}_curve.json"
    return Reference(convergence, Curve(**json.loads(fitted.read_text("utf-8"))) if fitted.is_file() else None)


@cache
def lag_weights(lag_scale: float) -> tuple[float, ...]:
    """Return the probability of each of LAGS."""
    densities = [(1 + (lag / lag_scale) ** 2 / 3) ** -2 for lag in LAGS]
    total = sum(densities)
    return tuple(density / total for density in densities)


@cache
def band(benchmark: str | None, global_batch_size: int | None) -> tuple[BandPoint, ...]:
    """Return the band at each evaluation by the rules, up to the last published one; empty where none is known."""
    known = reference(benchmark, global_batch_size)
    if known is None or known.curve is None:
        return ()
    tail, last = (1 - BAND_SHARE) / 2, known.convergence.shares[-1][0]
    return tuple(
        BandPoint(at, _loss_above(tail, at, known, known.curve), _loss_above(1 - tail, at, known, known.curve))
        for at in known.grid()
        if at <= last
    )


def outside_band(
    evaluations: Sequence[tuple[float, float]], *, benchmark: str | None, global_batch_size: int | None
) -> bool:
    """Return whether most evaluations lie outside the band; single spikes happen. False where no band is known."""
    known = reference(benchmark, global_batch_size)
    return known is not None and is_outside(evaluations, known)


def is_outside(evaluations: Sequence[tuple[float, float]], known: Reference) -> bool:
    """Return whether most evaluations lie outside the reference band; False where no band is known."""
    curve = known.curve
    if curve is None:
        return False
    tail = (1 - BAND_SHARE) / 2
    shares = [_share_below(loss, samples, known, curve) for samples, loss in evaluations]
    return 2 * sum(not tail <= share <= 1 - tail for share in shares) > len(shares)


def _share_below(loss: float, samples: float, known: Reference, curve: Curve) -> float:
    """Return the share of runs whose loss lies below this one after as many samples."""
    at, weights = known.progress(samples), lag_weights(curve.lag_scale)
    return sum(weight * curve.below(loss - curve.loss(at, lag)) for lag, weight in zip(LAGS, weights, strict=True))


def _loss_above(share: float, samples: int, known: Reference, curve: Curve) -> float:
    """Return the loss below which this share of runs lies, by bisection to 1e-6."""
    low, high = 0.0, 2 * curve.loss(known.progress(samples), LAGS[-1])
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if _share_below(middle, samples, known, curve) < share else (low, middle)
    return high
