"""Compare two systems by the values of whole runs: ratio, confidence interval and verdict.

The logarithms of the values are compared, so that neither the unit nor the order of the systems matters.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bench.errors import ConfigError
from bench.results.measurement import is_rate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Pairing(StrEnum):
    """How the runs of two systems are paired."""

    block = "paired by block"
    """Value k of both systems is of block k, whose runs ran one after the other."""
    order = "paired in order of time"
    """The k-th run of one system with the k-th run of the other; equal to blocks only if the runs alternated."""
    none = "not paired"
    """Two sets of runs of any sizes, compared by Welch's t-test."""


class Verdict(StrEnum):
    """The verdict of a comparison."""

    equivalent = "equivalent"
    """The difference is within the margin."""
    equivalent_different = "equivalent, different"
    """There is a significant difference, and it is within the margin."""
    different = "different"
    undecided = "undecided"
    not_compared = "not compared"
    """The values cannot be compared; see the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The comparison of two systems: the ratio of the first to the second."""

    names: tuple[str, str]
    measurement: str
    unit: str
    higher_is_better: bool
    pairing: Pairing
    margin: float
    """A share. Systems are equivalent if their ratio is between 1 / (1 + margin) and 1 + margin."""
    confidence: float
    first: tuple[float, ...]
    second: tuple[float, ...]
    """One value per run. If runs are paired, first[k] and second[k] are a pair."""
    verdict: Verdict
    reason: str = ""
    """Why the values cannot be compared."""
    ratio: float | None = None
    """The geometric mean of the ratios of pairs, or the ratio of the geometric means of two sets."""
    low: float | None = None
    high: float | None = None
    """The t-interval of the ratio."""
    bootstrap: tuple[float, float] | None = None
    """The BCa interval of the ratio, which assumes no normal distribution; None for fewer than six values."""
    p_equivalent: float | None = None
    """TOST: the p-value of the hypothesis that the ratio is outside the margin."""
    spread: float | None = None
    """The run-to-run standard deviation as a share: that of the log ratios of pairs / √2, or pooled over both sets."""
    num_more: int | None = None
    """How many more pairs, or runs of each system, an undecided comparison needs; None for more than 10,000."""
    notes: tuple[str, ...] = ()
    """What a reader must know in addition to the verdict."""

    @property
    def percent(self) -> float | None:
        """The difference in percent of the second system's value, with its sign."""
        return None if self.ratio is None else 100 * (self.ratio - 1)

    @property
    def is_better(self) -> bool | None:
        """Whether the first system is better; None without a significant difference."""
        if self.ratio is None or self.verdict not in (Verdict.different, Verdict.equivalent_different):
            return None
        return (self.ratio > 1) == self.higher_is_better

    @property
    def text(self) -> str:
        """The verdict as a text, such as "fp8 is 26–28 % faster than bf16".

        Faster and slower refer to the speed, so that step times and rates of the same runs have the same text.
        """
        first, second = self.names
        within = f"equivalent within {100 * self.margin:g} %"
        match self.verdict:
            case Verdict.not_compared:
                return f"not compared: {self.reason}"
            case Verdict.undecided:
                return f"undecided: {_more(self)}"
            case Verdict.equivalent:
                return within
            case Verdict.equivalent_different:
                return f"{within}, {first} {_direction(self)} by {_range(self)} %"
        if _is_speed(self.unit):
            return f"{first} is {_range(self)} % {_direction(self)} than {second}"
        return f"{first} has {_range(self)} % {_direction(self)} {self.measurement} than {second}"


def compare(
    first: Sequence[float],
    second: Sequence[float],
    *,
    names: tuple[str, str],
    measurement: str,
    higher_is_better: bool,
    unit: str = "",
    margin: float = 0.02,
    confidence: float = 0.95,
    pairing: Pairing = Pairing.block,
) -> Comparison:
    """Compare two systems. Each value is that of a whole run, not of a step.

    The interval is the t-interval of the log ratios. Equivalence is tested by two one-sided t-tests (TOST), each at the
    level 1 - confidence. The BCa bootstrap of the same mean is a cross-check.

    Raises:
        ConfigError: margin or confidence is out of range, or the numbers of paired runs differ.
    """
    _check(margin=margin, confidence=confidence)
    comparison = Comparison(
        names=names,
        measurement=measurement,
        unit=unit,
        higher_is_better=higher_is_better,
        pairing=pairing,
        margin=margin,
        confidence=confidence,
        first=tuple(map(float, first)),
        second=tuple(map(float, second)),
        verdict=Verdict.not_compared,
    )
    _check_pairs(comparison)
    reason = _why_not(comparison)
    return replace(comparison, reason=reason) if reason else _judged(comparison)


def values_by_block(
    first: Mapping[Hashable, float], second: Mapping[Hashable, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the values of the blocks that both systems have, in the order of the first."""
    blocks = [block for block in first if block in second]
    return tuple(first[block] for block in blocks), tuple(second[block] for block in blocks)


def _check(*, margin: float, confidence: float) -> None:
    if not 0 < margin < 1:
        raise ConfigError(
            f"margin is {100 * margin:g} %, but must be between 0 and 100 %",
            where="margin",
            fix="set margin to a value between 0 and 100 %",
        )
    if not 0.5 < confidence < 1:
        raise ConfigError(
            f"confidence is {confidence:g}, but must be between 0.5 and 1",
            where="confidence",
            fix="set confidence to a value between 0.5 and 1, such as 0.95",
        )


def _check_pairs(comparison: Comparison) -> None:
    if comparison.pairing is not Pairing.none and len(comparison.first) != len(comparison.second):
        first, second = comparison.names
        raise ConfigError(
            f"the runs cannot be paired: {first} has {len(comparison.first)} runs, but {second} has "
            f"{len(comparison.second)} runs",
            where=comparison.measurement,
            fix="give both systems the same number of runs, or compare the runs without pairs (--pairing none)",
        )


def _why_not(comparison: Comparison) -> str:
    """Return why the values cannot be compared; empty if they can."""
    of_each = tuple(zip(comparison.names, (comparison.first, comparison.second), strict=True))
    for name, values in of_each:
        unusable = [value for value in values if not 0 < value < math.inf]
        if unusable:
            return f"only positive finite numbers can be compared, and {name} has {unusable[0]:g}"
        if not values:
            return (
                f"{name} has no value"
                if comparison.pairing is Pairing.none
                else "no pair of runs has values of both systems"
            )
    single = " and of ".join(name for name, values in of_each if len(values) == 1)
    return f"n = 1 run of {single}: the run-to-run variation is unknown" if single else ""


def _judged(comparison: Comparison) -> Comparison:
    """Return the comparison with interval, verdict and notes."""
    import numpy as np

    pairs, confidence, bound = (
        comparison.pairing is not Pairing.none,
        comparison.confidence,
        math.log1p(comparison.margin),
    )
    first, second = np.log(comparison.first), np.log(comparison.second)
    samples = (first - second,) if pairs else (first, second)
    estimate = (of_pairs if pairs else of_sets)(*samples, bound=bound, confidence=confidence)
    deviations = [float(np.std(sample, ddof=1)) for sample in samples]
    needed = num_needed(*deviations, bound=bound, confidence=confidence)
    verdict = Verdict(str(verdicts(estimate, bound=bound, confidence=confidence)))
    bootstrap = bootstrapped(*samples, confidence=confidence)
    return replace(
        comparison,
        verdict=verdict,
        ratio=_ratio_of(estimate.difference),
        low=_ratio_of(estimate.low),
        high=_ratio_of(estimate.high),
        bootstrap=None if bootstrap is None else (_ratio_of(bootstrap[0]), _ratio_of(bootstrap[1])),
        p_equivalent=float(estimate.p_equivalent),
        spread=math.hypot(*deviations) / math.sqrt(2),
        num_more=max(1, needed - min(len(first), len(second))) if needed and verdict is Verdict.undecided else None,
        notes=tuple(_notes(estimate, bootstrap)),
    )


def verdicts(estimate: "Estimate", *, bound: float, confidence: float) -> "NDArray[np.str_]":
    """Return the verdict of each comparison of an estimate; `bound` is the margin as a log ratio.

    A significant difference is equivalent only if its whole interval is within the margin. TOST alone requires this
    only of the interval of confidence 1 - 2 alpha, which is narrower than the printed one; "equivalent within 2 %,
    slower by 0.2–2.1 %" would contradict itself.
    """
    import numpy as np

    is_equivalent = estimate.p_equivalent < 1 - confidence
    is_different = (estimate.low > 0) | (estimate.high < 0)
    is_within = np.maximum(-estimate.low, estimate.high) < bound
    return np.select(
        [is_different & is_equivalent & is_within, is_different, is_equivalent],
        [Verdict.equivalent_different, Verdict.different, Verdict.equivalent],
        Verdict.undecided,
    )


def _ratio_of(difference: float) -> float:
    """Return the ratio of a difference of logarithms, limited to the range of a float."""
    return math.exp(max(-_LARGEST, min(difference, _LARGEST)))


_LARGEST = 700.0


def _notes(estimate: "Estimate", bootstrap: tuple[float, float] | None) -> Iterator[str]:
    if estimate.low == estimate.high:
        yield "all ratios are equal (a counted or rounded value), so that there is no interval"
    if bootstrap is None:
        return
    beyond = max(estimate.low - bootstrap[0], bootstrap[1] - estimate.high)
    if beyond > _BEYOND * (estimate.high - estimate.low) / 2:
        low, high = (100 * math.expm1(end) for end in bootstrap)
        yield (
            f"the bootstrap interval differs ({low:+.2f} to {high:+.2f} %): the values are skewed or have an outlier; "
            "check each value"
        )


_BEYOND = 0.1
"""How far the bootstrap interval may exceed the t-interval, as a share of its half-width. Of samples of normal values,
one in 20 exceeds it; of samples of six values with one outlier, all do."""


_TOO_MANY = 100
"""More runs than anybody would add: their number says only that the runs differ too much among themselves."""


def _more(comparison: Comparison) -> str:
    if comparison.num_more is None or comparison.num_more > _TOO_MANY:
        spread = "" if comparison.spread is None else f", by {100 * comparison.spread:.2g} %"
        return f"too noisy (runs of the same system differ too much from each other{spread})"
    count = f"{comparison.num_more:,}"
    one, many = ("run of each", "runs of each") if comparison.pairing is Pairing.none else ("pair", "pairs")
    return f"{count} more {one if comparison.num_more == 1 else many}"


def _is_speed(unit: str) -> bool:
    return is_rate(unit) or unit in _TIMES


_TIMES = ("ns", "us", "µs", "ms", "s", "min", "h")


def _direction(comparison: Comparison) -> str:
    assert comparison.ratio is not None
    if _is_speed(comparison.unit):
        return "faster" if (comparison.ratio > 1) != (comparison.unit in _TIMES) else "slower"
    return "higher" if comparison.ratio > 1 else "lower"


def _range(comparison: Comparison) -> str:
    """Return the interval in percent, the smaller end first; for times that of the speed."""
    assert comparison.low is not None and comparison.high is not None
    power = -1 if comparison.unit in _TIMES else 1
    ends = sorted(abs(100 * (end**power - 1)) for end in (comparison.low, comparison.high))
    width = ends[1] - ends[0]
    decimals = 2 if width <= 0 else max(0, min(2, math.ceil(-math.log10(width / 3))))
    low, high = (f"{end:,.{decimals}f}" for end in ends)
    return low if low == high else f"{low}–{high}"


Floats = NDArray[np.float64]

_NO_SPREAD = 1e-9
"""Smaller differences of log ratios are rounding errors."""
_BOOTSTRAP_FROM = 6
"""With fewer values there are too few different resamples for a bootstrap."""
_NUM_RESAMPLES = 9999
_SEED = 15
_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The difference of the mean logarithms of two systems; each field has one number per comparison."""

    difference: Any
    low: Any
    high: Any
    """The t-interval of the difference."""
    p_equivalent: Any
    """TOST: the larger p-value of the two one-sided tests that the difference is outside the bound."""


def of_pairs(ratios_N: Floats, *, bound: float, confidence: float) -> Estimate:
    """Return the estimate from the log ratio of each pair; the bound of TOST is a log ratio."""
    if _is_constant(ratios_N):
        return _exactly(float(ratios_N[0]), bound=bound)
    interval = stats.ttest_1samp(ratios_N, 0, axis=-1).confidence_interval(confidence)
    above = stats.ttest_1samp(ratios_N, -bound, axis=-1, alternative="greater").pvalue
    below = stats.ttest_1samp(ratios_N, bound, axis=-1, alternative="less").pvalue
    p = np.maximum(above, below)
    return Estimate(difference=np.mean(ratios_N, axis=-1), low=interval.low, high=interval.high, p_equivalent=p)


def t_interval(values_N: Floats, *, confidence: float) -> tuple[float, float, float]:
    """Return the low end, the mean and the high end of the t-interval of the mean; a point for equal values."""
    mean = float(np.mean(values_N))
    if _is_constant(values_N):
        return mean, mean, mean
    n = len(values_N)
    half_width = float(stats.t.ppf((1 + confidence) / 2, n - 1) * np.std(values_N, ddof=1)) / math.sqrt(n)
    return mean - half_width, mean, mean + half_width


def of_sets(first_N: Floats, second_M: Floats, *, bound: float, confidence: float) -> Estimate:
    """Return the estimate from the logarithms of two unpaired sets, by Welch's t-test."""
    difference = np.mean(first_N, axis=-1) - np.mean(second_M, axis=-1)
    if _is_constant(first_N) and _is_constant(second_M):
        return _exactly(float(difference), bound=bound)
    welch: dict[str, Any] = {"equal_var": False, "axis": -1}
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # one of the sets may be constant
        interval = stats.ttest_ind(first_N, second_M, **welch).confidence_interval(confidence)
        above = stats.ttest_ind(first_N + bound, second_M, alternative="greater", **welch).pvalue
        below = stats.ttest_ind(first_N - bound, second_M, alternative="less", **welch).pvalue
    p = np.maximum(above, below)
    return Estimate(difference=difference, low=interval.low, high=interval.high, p_equivalent=p)


def of_one(one: float, others: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the difference of a logarithm from the mean of others, and the half-width of their prediction interval.

    The half-width is t s √(1 + 1 / n) of the others.
    """
    n = len(others)
    quantile = float(stats.t.ppf((1 + confidence) / 2, n - 1))
    return one - float(np.mean(others)), quantile * float(np.std(others, ddof=1)) * math.sqrt(1 + 1 / n)


def _is_constant(values_N: Floats) -> bool:
    return values_N.ndim == 1 and float(np.ptp(values_N)) < _NO_SPREAD


def _exactly(difference: float, *, bound: float) -> Estimate:
    """Return the estimate for values without spread, which have no t-test: the interval is a point."""
    difference = 0.0 if abs(difference) < _NO_SPREAD else difference
    p = 0.0 if abs(difference) < bound else 1.0
    return Estimate(difference=difference, low=difference, high=difference, p_equivalent=p)


def bootstrapped(first_N: Floats, second_M: Floats | None = None, *, confidence: float) -> tuple[float, float] | None:
    """Return the BCa interval of the mean of the log ratios of pairs, or of the difference of the means of two sets.

    None if a sample has too few values or no spread. The seed is fixed: equal values have equal intervals.
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
    """Return how many pairs (one deviation) or runs of each set (two) decide a comparison, whatever its difference.

    The deviations are assumed constant. A difference d is significant if it exceeds the half-width h of the two-sided
    interval. Systems are equivalent if d plus the half-width g of the one-sided interval is below the bound. With
    g + h <= bound, each d is one or the other. None if 10,000 are not enough.
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
    """Return the smallest sufficient number from 2 on; every larger number must be sufficient, too."""
    if not is_enough(_MOST):
        return None
    low, high = 1, _MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
