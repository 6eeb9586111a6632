"""Compare the arms of a study with reference values, such as those of the machine when it was accepted."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean


class ReferenceVerdict(StrEnum):
    """The verdict on a reference value."""

    passed = "passed"
    failed = "failed"
    """The mean is worse than the reference by more than the tolerance."""
    not_measured = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """A reference value of an arm, and what was measured."""

    arm: str
    measurement: str
    unit: str
    reference: float
    tolerance: float
    """How much worse the mean may be, as a share."""
    verdict: ReferenceVerdict
    value: float | None = None
    """The mean over the valid runs."""
    n: int = 0
    """The number of valid runs."""
    change: float | None = None
    """The mean divided by the reference, minus 1."""
    reason: str = ""
    """Why nothing was measured."""
    platform: str = ""
    """The platform in a table of several platforms."""

    @property
    def text(self) -> str:
        """The result in words."""
        if self.value is None or self.change is None:
            return self.reason
        unit = f" {self.unit}" if self.unit else ""
        return (
            f"{self.value:.4g}{unit} is {100 * self.change:+.1f} % from {self.reference:.4g}{unit} "
            f"(tolerance {100 * self.tolerance:g} %, n = {self.n})"
        )


def share(text: str) -> float | None:
    """Return a tolerance such as `3%` or `3 %` as a share; None for another text or one that is not above 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    return float(match[1]) / 100 if match and float(match[1]) > 0 else None


def judged(result: ReferenceResult, values: list[float], *, higher_is_better: bool) -> ReferenceResult:
    """Return a reference with its verdict by the values of the valid runs."""
    if not values:
        return result
    mean = fmean(values)
    change = mean / result.reference - 1
    is_worse = (-change if higher_is_better else change) > result.tolerance
    verdict = ReferenceVerdict.failed if is_worse else ReferenceVerdict.passed
    return replace(result, value=mean, n=len(values), change=change, verdict=verdict, reason="")
