"""Efficiency coefficients: how many times the reference's value another system has.

The reference is the fastest system on as many nodes and has the coefficient 1. A system that takes 93 minutes where the
reference takes 29 has 3.2; of rates, 17.6 tokens/s beside the reference's 71 are 0.25. So the documents define them.
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
    """How many runs of the system and of the reference."""
    low: float | None = None
    high: float | None = None
    """The interval of the coefficient."""
    reason: str = ""
    """Why there is no interval."""

    @property
    def text(self) -> str:
        """The coefficient with three significant digits, and its interval where there is one."""
        interval = "" if self.low is None or self.high is None else f" ({_three(self.low)}–{_three(self.high)})"
        return f"{_three(self.value)}{interval}"


def coefficient(
    values: Sequence[float], reference: Sequence[float], *, pairing: Pairing = Pairing.none, confidence: float = 0.95
) -> Coefficient:
    """Return the efficiency coefficient of run-level values, with the t-interval of its logarithm.

    It is a ratio of geometric means, which for spreads of a few percent is that of the means. One run of each, as the
    documents have them, gives a coefficient without an interval.

    Raises:
        ConfigError: a value is missing or not positive, or runs that are to be paired differ in number.
    """
    names = ("the system", "the reference")
    found = compare(
        values,
        reference,
        names=names,
        measurement="values",
        higher_is_better=True,
        pairing=pairing,
        confidence=confidence,
    )
    if not found.first or not found.second or min(*found.first, *found.second) <= 0:
        raise ConfigError(
            f"no efficiency coefficient: {found.reason}", where="values", fix="give the positive values of whole runs"
        )
    value = geometric_mean(found.first) / geometric_mean(found.second)
    n = len(found.first), len(found.second)
    return Coefficient(value=value, n=n, low=found.low, high=found.high, reason=found.reason)


def _three(number: float) -> str:
    return f"{number:#.3g}".rstrip(".") if number < 1000 else f"{number:,.0f}"
