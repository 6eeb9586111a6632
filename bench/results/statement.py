"""Judge the statements of a study: whether ratios of arms, or values of arms, are within stated bounds.

A statement says something about every pair of arms that it names. It holds if the interval of every pair is within the
bounds. It does not hold if the interval of one pair is beyond a bound; since each of k pairs could be beyond it by
chance, this interval has the confidence 1 - (1 - confidence) / k. Everything else is undecided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

CONFIDENCE = 0.95


class StatementVerdict(StrEnum):
    """The verdict on a statement."""

    holds = "holds"
    does_not_hold = "does not hold"
    undecided = "undecided"
    not_measured = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The range of values in which a statement holds. None means that there is no bound on this side."""

    at_least: float | None = None
    at_most: float | None = None

    def includes(self, low: float, high: float) -> bool:
        """Return whether a whole interval is within the bounds."""
        return self._is_above(low) and self._is_below(high)

    def excludes(self, low: float, high: float) -> bool:
        """Return whether a whole interval is beyond one of the bounds."""
        return not self._is_above(high) or not self._is_below(low)

    def slack(self, low: float, high: float) -> float:
        """Return by which factor, as a logarithm, an interval is within the bounds; negative if it is not."""
        below = math.inf if self.at_least is None else math.log(low / self.at_least)
        above = math.inf if self.at_most is None else math.log(self.at_most / high)
        return min(below, above)

    def _is_above(self, value: float) -> bool:
        return self.at_least is None or value >= self.at_least

    def _is_below(self, value: float) -> bool:
        return self.at_most is None or value <= self.at_most

    @property
    def text(self) -> str:
        if self.at_least is None and self.at_most is None:
            return ""
        if self.at_most is None:
            return f"≥ {self.at_least:g}"
        return f"≤ {self.at_most:g}" if self.at_least is None else f"{self.at_least:g} to {self.at_most:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedValues:
    """The values by which one pair of arms, or one arm, is judged."""

    first: str
    second: str = ""
    """Empty: the values are those of `first`, not ratios."""
    values: tuple[float, ...] = ()
    """In each block the ratio of the two runs, or the value of the run."""
    reason: str = ""
    """Why there is no value."""
    cannot_run: bool = False
    """Whether an arm cannot run on this cluster; the statement is then not about this pair."""

    @property
    def name(self) -> str:
        return f"{self.first} / {self.second}" if self.second else self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedInterval:
    """The geometric mean over blocks with its interval, for one pair of arms or for one arm."""

    name: str
    n: int
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    """Why there is no value or no interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRatios:
    """The ratios or values of a statement from one publication. They have no interval."""

    publication: str
    n: int
    low: float
    high: float
    within: bool
    """Whether all ratios or values are within the bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementResult:
    """A statement and its verdict."""

    text: str
    source: str
    measurement: str
    bounds: Bounds
    verdict: StatementVerdict
    reason: str
    """The reason for the verdict, or why there is none."""
    intervals: tuple[StatedInterval, ...] = ()
    deciding: int | None = None
    """The index of the interval that decides the verdict. If no interval decides: the index of the interval closest to
    a bound."""
    published: tuple[PublishedRatios, ...] = ()
    platform: str = ""
    """The platform in a table of several platforms."""

    @property
    def decided_by(self) -> StatedInterval | None:
        return None if self.deciding is None else self.intervals[self.deciding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Whether one arm fits into GPU memory, and how this is known."""

    name: str
    fits: bool | None
    """None: neither its runs nor the plan show it."""
    how: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The verdict on some values, with the intervals on which it is based."""

    verdict: StatementVerdict
    reason: str
    intervals: tuple[StatedInterval, ...] = ()
    deciding: int | None = None


def decide(stated: Sequence[StatedValues], bounds: Bounds, *, confidence: float = CONFIDENCE) -> Decision:
    """Return the verdict on a statement about these pairs of arms."""
    able = [one for one in stated if not one.cannot_run]
    if not any(one.values for one in able):
        reasons = dict.fromkeys(one.reason for one in able or stated if one.reason)
        return Decision(verdict=StatementVerdict.not_measured, reason="; ".join(reasons) or "no arm has a value")
    intervals = tuple(_interval(one, confidence) for one in able)
    beyond = [place for place, one in enumerate(able) if _is_beyond(one, bounds, 1 - (1 - confidence) / len(able))]
    known = [place for place, one in enumerate(intervals) if one.low is not None]
    nearest = min(beyond or known, key=lambda place: _slack(intervals[place], bounds), default=None)
    verdict, reason = _verdict(intervals, bounds, nearest, is_beyond=bool(beyond))
    return Decision(
        verdict=verdict, reason="; ".join([reason, *_left_out(stated)]), intervals=intervals, deciding=nearest
    )


def decide_fit(arms: Sequence[Fit], *, fits: bool) -> Decision:
    """Return the verdict on the statement that all of these arms fit into GPU memory, or that none does."""
    contrary = [one for one in arms if one.fits is (not fits)]
    unknown = [one for one in arms if one.fits is None]
    if contrary:
        verdict, shown = StatementVerdict.does_not_hold, contrary
    elif unknown:
        verdict, shown = StatementVerdict.not_measured, unknown
    else:
        verdict, shown = StatementVerdict.holds, list(arms)
    return Decision(verdict=verdict, reason="; ".join(f"{one.name}: {one.how}" for one in shown))


def _verdict(
    intervals: Sequence[StatedInterval], bounds: Bounds, nearest: int | None, *, is_beyond: bool
) -> tuple[StatementVerdict, str]:
    if is_beyond and nearest is not None:
        return StatementVerdict.does_not_hold, f"{_text(intervals[nearest])}, not {bounds.text}"
    unknown = [one for one in intervals if one.low is None]
    if unknown:
        name, reason = f"{unknown[0].name}: ", unknown[0].reason
        return StatementVerdict.undecided, reason if reason.startswith(name) else f"{name}{reason}"
    assert nearest is not None
    low, high = intervals[nearest].low, intervals[nearest].high
    assert low is not None and high is not None
    if not bounds.includes(low, high):
        return StatementVerdict.undecided, f"{_text(intervals[nearest])}, across the bound"
    closest = f", the closest of {len(intervals)}" if intervals[1:] else ""
    return StatementVerdict.holds, f"{_text(intervals[nearest])}{closest}"


def _left_out(stated: Sequence[StatedValues]) -> list[str]:
    """Return a remark on the pairs that this cluster cannot run."""
    number = sum(one.cannot_run for one in stated)
    return [f"{number} of {len(stated)} pairs cannot run here"] if number else []


def _text(one: StatedInterval) -> str:
    return f"{one.name} is {range_text(one.low, one.high)}"


def number_text(number: float | None) -> str:
    """Return a number with three significant digits, or all digits of its whole part."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def range_text(low: float | None, high: float | None) -> str:
    """Return the ends of an interval; one number if both are shown alike."""
    ends = number_text(low), number_text(high)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _slack(one: StatedInterval, bounds: Bounds) -> float:
    assert one.low is not None and one.high is not None
    return bounds.slack(one.low, one.high)


def _interval(one: StatedValues, confidence: float) -> StatedInterval:
    n = len(one.values)
    ends = _ends(one.values, confidence)
    if isinstance(ends, str):
        mean = one.values[0] if n == 1 else None
        return StatedInterval(name=one.name, n=n, value=mean, reason=ends if n else one.reason or ends)
    low, mean, high = ends
    return StatedInterval(name=one.name, n=n, value=mean, low=low, high=high)


def _is_beyond(one: StatedValues, bounds: Bounds, confidence: float) -> bool:
    ends = _ends(one.values, confidence)
    return not isinstance(ends, str) and bounds.excludes(ends[0], ends[2])


def _ends(values: Sequence[float], confidence: float) -> tuple[float, float, float] | str:
    """Return low end, geometric mean and high end of the t-interval of the logarithms; a text if there is none."""
    from bench.results import comparison

    if any(not 0 < value < math.inf for value in values):
        return "only positive finite numbers have an interval"
    if len(values) < 2:
        return "n = 1 run: the run-to-run variation is unknown" if values else "no value"
    import numpy as np

    ends = comparison.t_interval(np.log(np.asarray(values, dtype=float)), confidence=confidence)
    low, mean, high = (math.exp(max(-_LARGEST, min(end, _LARGEST))) for end in ends)
    return low, mean, high


_LARGEST = 700.0
"""The largest logarithm whose exponential is a float."""
