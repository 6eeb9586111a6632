"""Draw what a kernels task measured: rates of GEMMs over M, of copies and collectives over bytes, of attention over
the length of a row.

Source of the first five: figures 11 to 15 of "Dissecting the Runtime Performance of the Training, Fine-tuning, and
Inference of Large Language Models" (arXiv 2311.03687).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.canvas import FAINT_INK, INK, TARGET_COLOR, canvas, empty, save
from bench.results.kernels import KernelsResult, Measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#1f5a8c", "#e08a00", "#5b9279", "#8e5a9b", "#9db4c8", "#555555", "#b5651d", "#7a9e2b")
MARKERS = "osD^vPX*"
_HEIGHT_INCHES = 4.2


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one kernel that differ in one size only, by that size."""

    name: str
    points: Sequence[tuple[float, Measured]]


def draw(kernels: KernelsResult, folder: Path, *, heading: str, note: str) -> list[Path]:
    """Draw every figure that the points have data for, as PNGs in a folder; return them in the order of the document.

    A rate is that of the median time; the shade is from the 10th to the 90th percentile.
    """
    return [
        path
        for name, figure in _FIGURES.items()
        if figure(kernels.measured, path := folder / f"{name}.png", heading, note)
    ]


def gemm_figure(measured: Sequence[Measured], path: Path, heading: str, note: str) -> bool:
    """Draw TFLOP/s over M for each N and K, a panel for each precision; return whether there is anything to draw."""
    found = [one for one in measured if one.point.family == "gemm" and not one.point.is_sustained]
    precisions = list(dict.fromkeys(one.point.variant for one in found))
    if not found:
        return False
    figure, panels = canvas(_HEIGHT_INCHES, f"GEMMs: {heading}", note, panels=len(precisions))
    for axes, precision in zip(panels, precisions, strict=True):
        of_precision = [one for one in found if one.point.variant == precision]
        curves = [curve for curve in _curves(of_precision, _shape, _rows) if curve.points[1:]]
        _plot(axes, curves, _rates)
        single = [
            one for curve in _curves(of_precision, _shape, _rows) if not curve.points[1:] for _, one in curve.points
        ]
        axes.plot(
            [_rows(one) for one in single], [one.rate for one in single], ".", color=FAINT_INK, label="other shapes"
        )
        _lines(axes, of_precision[0])
        _label(axes, f"{precision.upper()} (dashed: unaligned M)", "M", of_precision[0].point.unit)
    save(figure, path)
    return True


def _shape(one: Measured) -> str:
    m, n, k = one.point.sizes
    return f"{'unaligned ' if m % 8 else ''}N{n} K{k}"


def _rows(one: Measured) -> float:
    return one.point.sizes[0]


def memcpy_figure(measured: Sequence[Measured], path: Path, heading: str, note: str) -> bool:
    """Draw latency and GB/s of every kind of copy over bytes; return whether there is anything to draw."""
    found = [one for one in measured if one.point.family == "memcpy"]
    curves = list(_curves(found, lambda one: one.point.kernel.removeprefix("copy "), _bytes))
    return _over_bytes(curves, path, f"memory copies: {heading}", note)


def collective_figure(operations: Sequence[str]) -> "Figure":
    """Return what draws latency and bus bandwidth over bytes of some collectives."""

    def figure(measured: Sequence[Measured], path: Path, heading: str, note: str) -> bool:
        found = [one for one in measured if one.point.family == "collectives" and one.point.operation in operations]
        if operations[1:]:  # several: of as many ranks as there are
            most = max((one.point.ranks for one in found), default=0)
            found = [one for one in found if one.point.ranks == most]
        name = operations[0].replace("_", "-") if not operations[1:] else "collectives"
        return _over_bytes(list(_curves(found, lambda one: one.point.kernel, _bytes)), path, f"{name}: {heading}", note)

    return figure


def _bytes(one: Measured) -> float:
    return one.point.sizes[0]


def _over_bytes(curves: Sequence[Curve], path: Path, heading: str, note: str) -> bool:
    if not curves:
        return False
    figure, (left, right) = canvas(_HEIGHT_INCHES, heading, note, panels=2)
    _plot(left, curves, _times)
    _plot(right, curves, _rates)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
    first = curves[0].points[0][1]
    left.set_yscale("log")
    if first.point.family == "memcpy":  # the host's link and the device's memory are two orders of magnitude apart
        right.set_yscale("log")
    _label(left, "latency", "bytes", "microseconds")
    _label(right, "bandwidth" if first.point.family == "memcpy" else "bus bandwidth", "bytes", first.point.unit)
    save(figure, path)
    return True


def attention_figure(measured: Sequence[Measured], path: Path, heading: str, note: str) -> bool:
    """Draw TFLOP/s of each backend over the length of a row, forward and backward; return whether there is any."""
    found = [one for one in measured if one.point.family == "attention"]
    if not found:
        return False
    figure, panels = canvas(_HEIGHT_INCHES, f"causal attention: {heading}", note, panels=2)
    for axes, way in zip(panels, ("forward", "backward"), strict=True):
        of_way = [one for one in found if one.point.operation == way]
        if not of_way:
            empty(axes, "not measured")
            continue
        _plot(axes, list(_curves(of_way, lambda one: one.point.variant, _length)), _rates)
        _lines(axes, of_way[0])
        axes.set_xscale("log", base=2)
        _label(axes, way, "tokens of a row", of_way[0].point.unit)
    save(figure, path)
    return True


def _length(one: Measured) -> float:
    return one.point.sizes[3]


def _curves(
    measured: Sequence[Measured], name: Callable[[Measured], str], place: Callable[[Measured], float]
) -> Iterator[Curve]:
    """Yield the points of each name, by their place on the horizontal axis."""
    for found in dict.fromkeys(map(name, measured)):
        points = [(place(one), one) for one in measured if name(one) == found]
        yield Curve(found, sorted(points, key=lambda point: point[0]))


def _times(one: Measured) -> tuple[float, float, float]:
    return one.p10_us, one.latency_us, one.p90_us


def _rates(one: Measured) -> tuple[float, float, float]:
    return one.rate_at(one.p90_us), one.rate, one.rate_at(one.p10_us)


def _plot(axes: "Axes", curves: Sequence[Curve], values: Callable[[Measured], tuple[float, float, float]]) -> None:
    """Draw the curves of what `values` gives for a point: the 10th percentile, the median, the 90th percentile."""
    for number, curve in enumerate(curves):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        dashes = "--" if curve.name.startswith("unaligned") else "-"
        places = [place for place, _ in curve.points]
        low, middle, high = zip(*(values(one) for _, one in curve.points), strict=True)
        axes.plot(places, middle, dashes, label=curve.name, markersize=3.5, color=color, marker=marker)
        axes.fill_between(places, low, high, color=color, alpha=0.15, linewidth=0)


def _lines(axes: "Axes", one: Measured) -> None:
    """Draw the peak of the data sheet and the best rate known."""
    for rate, name, color in ((one.point.peak, "peak", FAINT_INK), (one.point.limit, "best known", TARGET_COLOR)):
        if rate is not None:
            axes.axhline(rate, color=color, linewidth=0.9, linestyle=":", label=name)


def _label(axes: "Axes", title: str, horizontal: str, vertical: str) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.legend(fontsize=6.5, edgecolor="none", framealpha=0.8)


Figure = Callable[[Sequence[Measured], Path, str, str], bool]
_FIGURES: dict[str, Figure] = {
    "gemm": gemm_figure,
    "memcpy": memcpy_figure,
    "all_gather": collective_figure(["all_gather"]),
    "reduce_scatter": collective_figure(["reduce_scatter"]),
    "collectives": collective_figure(["all_gather", "reduce_scatter", "reduce", "all_reduce", "all_to_all"]),
    "attention": attention_figure,
}
NAMES = tuple(_FIGURES)
"""Of the figures' files."""
