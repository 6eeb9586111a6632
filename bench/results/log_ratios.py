"""Intervals and tests of how far two systems lie apart, from the logarithms of run-level values.

The tests work on the last axis of an array, so that thousands of simulated comparisons are one call.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

_NO_SPREAD = 1e-9
"""Log ratios that differ by less than this differ by rounding only."""
_BOOTSTRAP_FROM = 6
"""Fewer values have too few different resamples for a bootstrap."""
_NUM_RESAMPLES = 9999
_SEED = 15
_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The difference of two systems' mean logarithms. Each field holds one number for each comparison."""

    difference: Any
    low: Any
    high: Any
    """The t-interval of the difference."""
    p_equivalent: Any
    """TOST: the larger p-value of the two one-sided tests that the difference lies beyond the bound."""


def of_pairs(ratios_N: Floats, *, bound: float, confidence: float) -> Estimate:
    """Return the estimate from the log ratio of each pair. The bound of TOST is a log ratio, too."""
    if _is_constant(ratios_N):
        return _exactly(float(ratios_N[0]), bound=bound)
    interval = stats.ttest_1samp(ratios_N, 0, axis=-1).confidence_interval(confidence)
    above = stats.ttest_1samp(ratios_N, -bound, axis=-1, alternative="greater").pvalue
    below = stats.ttest_1samp(ratios_N, bound, axis=-1, alternative="less").pvalue
    p = np.maximum(above, below)
    return Estimate(difference=np.mean(ratios_N, axis=-1), low=interval.low, high=interval.high, p_equivalent=p)


def of_sets(first_N: Floats, second_M: Floats, *, bound: float, confidence: float) -> Estimate:
    """Return the estimate from the logarithms of two unpaired sets, by Welch's t-test."""
    difference = np.mean(first_N, axis=-1) - np.mean(second_M, axis=-1)
    if _is_constant(first_N) and _is_constant(second_M):
        return _exactly(float(difference), bound=bound)
    welch: dict[str, Any] = {"equal_var": False, "axis": -1}
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # where one of the sets is constant
        interval = stats.ttest_ind(first_N, second_M, **welch).confidence_interval(confidence)
        above = stats.ttest_ind(first_N + bound, second_M, alternative="greater", **welch).pvalue
        below = stats.ttest_ind(first_N - bound, second_M, alternative="less", **welch).pvalue
    p = np.maximum(above, below)
    return Estimate(difference=difference, low=interval.low, high=interval.high, p_equivalent=p)


def of_one(one: float, others: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return how far a logarithm lies from the mean of others, and how far one more of them would at this confidence.

    The latter is the half-width of the t prediction interval: s √(1 + 1 / n) of the others.
    """
    n = len(others)
    quantile = float(stats.t.ppf((1 + confidence) / 2, n - 1))
    return one - float(np.mean(others)), quantile * float(np.std(others, ddof=1)) * math.sqrt(1 + 1 / n)


def _is_constant(values_N: Floats) -> bool:
    return values_N.ndim == 1 and float(np.ptp(values_N)) < _NO_SPREAD


def _exactly(difference: float, *, bound: float) -> Estimate:
    """Return the estimate of values without any spread, for which there is no t-test: the interval is a point."""
    difference = 0.0 if abs(difference) < _NO_SPREAD else difference
    p = 0.0 if abs(difference) < bound else 1.0
    return Estimate(difference=difference, low=difference, high=difference, p_equivalent=p)


def bootstrapped(first_N: Floats, second_M: Floats | None = None, *, confidence: float) -> tuple[float, float] | None:
    """Return the BCa interval of the mean of pairs' log ratios, or of the difference of the means of two sets.

    None where a sample has too few values or no spread. The seed is fixed: equal values have equal intervals.
    """
    samples = (first_N,) if second_M is None else (first_N, second_M)
    if any(sample.size < _BOOTSTRAP_FROM or _is_constant(sample) for sample in samples):
        return None
    interval = stats.bootstrap(
        samples,
        _mean if second_M is None else _difference,
        n_resamples=_NUM_RESAMPLES,
        confidence_level=confidence,
        method="BCa",
        random_state=np.random.default_rng(_SEED),
    ).confidence_interval
    return float(interval.low), float(interval.high)


def _mean(values_N: Floats, *, axis: int) -> Any:
    return np.mean(values_N, axis=axis)


def _difference(first_N: Floats, second_M: Floats, *, axis: int) -> Any:
    return np.mean(first_N, axis=axis) - np.mean(second_M, axis=axis)


def num_needed(*deviations: float, bound: float, confidence: float) -> int | None:
    """Return how many pairs (one deviation) or runs of each set (two) decide a comparison whatever the difference is.

    The deviations are supposed to stay. A difference d is proven where it exceeds the half-width h of the two-sided
    interval, and equivalence is where d and the half-width g of the one-sided interval together stay below the bound.
    Once g + h <= bound, each d is one or the other. None if 10,000 are not enough.
    """
    variances = [deviation**2 for deviation in deviations]
    error = math.sqrt(sum(variances))
    if error < _NO_SPREAD:
        return 2
    share = sum(variances) ** 2 / sum(variance**2 for variance in variances)  # of Welch's degrees of freedom in n - 1
    return _smallest(lambda n: _half_widths(share * (n - 1), confidence) * error / math.sqrt(n) <= bound)


def _half_widths(freedom: float, confidence: float) -> float:
    """Return the half-widths of the two-sided and the one-sided interval together, in standard errors."""
    alpha = 1 - confidence
    return float(stats.t.ppf(1 - alpha / 2, freedom) + stats.t.ppf(1 - alpha, freedom))


def _smallest(is_enough: Callable[[int], bool]) -> int | None:
    """Return the smallest number from 2 on that is enough; more is always enough, too."""
    if not is_enough(_MOST):
        return None
    low, high = 1, _MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
