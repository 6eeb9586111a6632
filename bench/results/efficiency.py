"""Efficiency coefficients: the value of a system divided by that of a reference.

The reference is the fastest system on the same number of nodes and has the coefficient 1. A system with 93 minutes has
3.2 if the reference has 29; one with 17.6 tokens/s has 0.25 if the reference has 71. This is the published definition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from bench.errors import ConfigError
from bench.results.comparison import Pairing, compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """A system's values divided by the reference's."""

    value: float
    n: tuple[int, int]
    """The numbers of runs of the system and of the reference."""
    low: float | None = None
    high: float | None = None
    """The confidence interval."""
    reason: str = ""
    """Why there is no interval."""

    @property
    def text(self) -> str:
        """The coefficient with three significant digits, and its interval if there is one."""
        interval = "" if self.low is None or self.high is None else f" ({_three(self.low)}–{_three(self.high)})"
        return f"{_three(self.value)}{interval}"


def coefficient(
    values: Sequence[float], reference: Sequence[float], *, pairing: Pairing = Pairing.none, confidence: float = 0.95
) -> Coefficient:
    """Return the efficiency coefficient of run-level values, with the t-interval of its logarithm.

    It is a ratio of geometric means, which for a spread of a few percent equals that of the means. One run of each
    system gives a coefficient without an interval.

    Raises:
        ConfigError: a value is missing or not positive, or paired runs differ in number.
    """
    names = ("the system", "the reference")
    comparison = compare(
        values,
        reference,
        names=names,
        measurement="values",
        higher_is_better=True,
        pairing=pairing,
        confidence=confidence,
    )
    if not comparison.first or not comparison.second or min(*comparison.first, *comparison.second) <= 0:
        raise ConfigError(
            f"the efficiency coefficient cannot be computed: {comparison.reason}",
            where="values",
            fix="give one positive value for each run of the system and of the reference",
        )
    value = geometric_mean(comparison.first) / geometric_mean(comparison.second)
    n = len(comparison.first), len(comparison.second)
    return Coefficient(value=value, n=n, low=comparison.low, high=comparison.high, reason=comparison.reason)


def _three(number: float) -> str:
    return f"{number:#.3g}".rstrip(".") if number < 1000 else f"{number:,.0f}"
