"""Points of kernels as curves: what the figures and the charts of a kernels page draw."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.results.kernels import Measured


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one kernel that differ in one size only, ordered by that size."""

    name: str
    points: Sequence[tuple[float, Measured]]


def curves(
    measured: Sequence[Measured], name: Callable[[Measured], str], place: Callable[[Measured], float]
) -> Iterator[Curve]:
    """Yield the points of each name, sorted by their position on the horizontal axis."""
    for curve_name in dict.fromkeys(map(name, measured)):
        points = [(place(one), one) for one in measured if name(one) == curve_name]
        yield Curve(curve_name, sorted(points, key=lambda point: point[0]))


def collectives_of(measured: Sequence[Measured], operations: Sequence[str]) -> list[Measured]:
    """Return the points of some collectives; of several collectives, only those of all ranks."""
    chosen = [one for one in measured if one.point.family == "collectives" and one.point.operation in operations]
    if not operations[1:]:
        return chosen
    most = max((one.point.ranks for one in chosen), default=0)
    return [one for one in chosen if one.point.ranks == most]


def attention_of(measured: Sequence[Measured]) -> list[Measured]:
    """Return the points of attention with the most tokens: other batches have other rates at the same length."""
    every = [one for one in measured if one.point.family == "attention"]
    most = max(map(_tokens, every), default=0)
    return [one for one in every if _tokens(one) == most]


def _tokens(one: Measured) -> int:
    """Return the tokens of a call of attention."""
    return one.point.sizes[0] * one.point.sizes[3]


def shape(one: Measured) -> str:
    m, n, k = one.point.sizes
    return f"{'unaligned ' if m % 8 else ''}N{n} K{k}"


def rows(one: Measured) -> float:
    return one.point.sizes[0]


def num_bytes(one: Measured) -> float:
    return one.point.sizes[0]


def length(one: Measured) -> float:
    return one.point.sizes[3]


def times(one: Measured) -> tuple[float, float, float]:
    return one.p10_us, one.latency_us, one.p90_us


def rates(one: Measured) -> tuple[float, float, float]:
    return one.rate_at(one.p90_us), one.rate, one.rate_at(one.p10_us)
