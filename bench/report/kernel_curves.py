"""Points of kernels as curves: what the figures and the charts of a kernels page draw."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.results.kernels import Measured

Point = tuple[float, Measured]
"""A position on the horizontal axis, and what was measured there."""
COLLECTIVES: Mapping[str, Sequence[str]] = {
    "all_gather": ("all_gather",),
    "reduce_scatter": ("reduce_scatter",),
    "collectives": ("all_gather", "reduce_scatter", "reduce", "all_reduce", "all_to_all"),
}
"""The collectives of each figure, by its name."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one kernel that differ in one size only, ordered by that size."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemms:
    """The GEMMs of one precision over M."""

    precision: str
    first: Measured
    curves: Sequence[Curve]
    """Of each N and K with several M."""
    single: Sequence[Point]
    """Of each N and K with one M."""

    @property
    def title(self) -> str:
        return f"{self.precision.upper()} (dashed: unaligned M)"


def gemms(measured: Sequence[Measured]) -> list[Gemms]:
    """Return the GEMMs of each precision, without the sustained ones."""
    chosen = [one for one in measured if one.point.family == "gemm" and not one.point.is_sustained]
    return [
        _of_precision(precision, [one for one in chosen if one.point.variant == precision])
        for precision in dict.fromkeys(one.point.variant for one in chosen)
    ]


def _of_precision(precision: str, measured: Sequence[Measured]) -> Gemms:
    every = _curves(measured, _shape, lambda one: one.point.sizes[0])
    return Gemms(
        precision=precision,
        first=measured[0],
        curves=[curve for curve in every if curve.points[1:]],
        single=[point for curve in every if not curve.points[1:] for point in curve.points],
    )


def copies(measured: Sequence[Measured]) -> list[Curve]:
    """Return each kind of memory copy over bytes."""
    chosen = [one for one in measured if one.point.family == "memcpy"]
    return _curves(chosen, lambda one: one.point.kernel.removeprefix("copy "), lambda one: one.point.sizes[0])


def collectives(measured: Sequence[Measured], operations: Sequence[str]) -> list[Curve]:
    """Return some collectives over bytes; of several collectives, only those of all ranks."""
    chosen = [one for one in measured if one.point.family == "collectives" and one.point.operation in operations]
    if operations[1:]:
        most = max((one.point.ranks for one in chosen), default=0)
        chosen = [one for one in chosen if one.point.ranks == most]
    return _curves(chosen, lambda one: one.point.kernel, lambda one: one.point.sizes[0])


def attention(measured: Sequence[Measured], way: str) -> list[Curve]:
    """Return each backend of attention, forward or backward, over the sequence length.

    Only the points with the most tokens: other batches have other rates at the same length.
    """
    every = [one for one in measured if one.point.family == "attention"]
    most = max(map(_tokens, every), default=0)
    chosen = [one for one in every if _tokens(one) == most and one.point.operation == way]
    return _curves(chosen, lambda one: one.point.variant, lambda one: one.point.sizes[3])


def _curves(
    measured: Sequence[Measured], name: Callable[[Measured], str], place: Callable[[Measured], float]
) -> list[Curve]:
    """Return the points of each name, sorted by their position on the horizontal axis."""
    return [
        Curve(of_name, sorted(((place(one), one) for one in measured if name(one) == of_name), key=lambda at: at[0]))
        for of_name in dict.fromkeys(map(name, measured))
    ]


def _shape(one: Measured) -> str:
    m, n, k = one.point.sizes
    return f"{'unaligned ' if m % 8 else ''}N{n} K{k}"


def _tokens(one: Measured) -> int:
    """Return the tokens of a call of attention."""
    return one.point.sizes[0] * one.point.sizes[3]


def times(one: Measured) -> tuple[float, float, float]:
    """Return the 10th percentile, the median and the 90th percentile of the time, in microseconds."""
    return one.p10_us, one.latency_us, one.p90_us


def rates(one: Measured) -> tuple[float, float, float]:
    """Return the rates at the 90th percentile, the median and the 10th percentile of the time."""
    return one.rate_at(one.p90_us), one.rate, one.rate_at(one.p10_us)
