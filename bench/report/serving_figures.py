"""Draw what serving tasks measured: latencies as a cumulative distribution, output as bars, and a sweep of rates.

Source of the first two: figures 6 to 10 of "Dissecting the Runtime Performance of the Training, Fine-tuning, and
Inference of Large Language Models" (arXiv 2311.03687).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.canvas import FAINT_INK, INK, TARGET_COLOR, canvas, save, shortened
from bench.report.kernel_figures import COLORS
from bench.results.loads import LoadResult
from bench.results.serving import ServingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT_INCHES, _BAR_INCHES, _FRAME_INCHES = 4.2, 0.34, 1.5
DASHES = ("-", "--", ":", "-.")
NAMES = ("latency_cdf", "output_throughput", "rate_sweep")
"""Of the figures' files."""


@dataclass(frozen=True, slots=True)
class Named:
    """The serving result of a trial, and what the figures call it."""

    name: str
    serving: ServingResult


def draw(found: Sequence[Named], folder: Path, *, heading: str, note: str) -> list[Path]:
    """Draw every figure that there is data for, as PNGs in a folder; return them."""
    figures = (cdf_figure, throughput_figure, sweep_figure)
    paths = [folder / f"{name}.png" for name in NAMES]
    return [
        path for figure, path in zip(figures, paths, strict=True) if figure(found, path, heading=heading, note=note)
    ]


def cdf_figure(found: Sequence[Named], path: Path, *, heading: str, note: str) -> bool:
    """Draw the share of all requests that were answered within so many seconds, a curve for each load.

    A curve that does not reach 1 says how many requests failed. Return whether there is anything to draw.
    """
    loads = [(named, load) for named in found for load in named.serving.loads if _sound(load)]
    if not loads:
        return False
    figure, (axes,) = canvas(_HEIGHT_INCHES, f"latency: {heading}", note)
    for number, (named, load) in enumerate(loads):
        seconds, total = _sound(load), len(load.status)
        shares = [(n + 1) / total for n in range(len(seconds))]
        label = shortened(_label(named, load, several=len(found) > 1))
        color, dashes = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        axes.step([0, *seconds], [0, *shares], dashes, where="post", label=label, color=color)
        limit = load.limits.latency_s
        if number == 0 and limit is not None and limit <= 2 * seconds[-1]:
            axes.axvline(limit, color=TARGET_COLOR, linewidth=0.9, linestyle=":", label="limit")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    _name(axes, "seconds from arrival to the last token", "share of all requests")
    axes.legend(fontsize=7, edgecolor="none", framealpha=0.8, loc="lower right")
    save(figure, path)
    return True


def throughput_figure(found: Sequence[Named], path: Path, *, heading: str, note: str) -> bool:
    """Draw the output tokens per second of every load as bars from zero; return whether there is any."""
    bars = [
        (_label(named, load, several=len(found) > 1), rate, COLORS[number % len(COLORS)])
        for number, named in enumerate(found)
        for load in named.serving.loads
        if (rate := load.output_throughput) is not None
    ]
    if not bars:
        return False
    figure, (axes,) = canvas(_FRAME_INCHES + _BAR_INCHES * len(bars), f"output: {heading}", note)
    places = list(range(len(bars)))[::-1]
    axes.barh(places, [rate for _, rate, _ in bars], color=[color for *_, color in bars], height=0.6)
    axes.set_yticks(places, [shortened(name, limit=40) for name, *_ in bars], parse_math=False)
    for place, (_, rate, _) in zip(places, bars, strict=True):
        text = f" {rate:,.0f}" if rate >= 100 else f" {rate:.3g}"
        axes.text(rate, place, text, va="center", fontsize=8, color=INK)
    axes.set_xlim(0, 1.12 * max(rate for _, rate, _ in bars))
    axes.set_xlabel("output tokens per second, of requests answered as asked for")
    axes.grid(axis="y", visible=False)
    save(figure, path)
    return True


def sweep_figure(found: Sequence[Named], path: Path, *, heading: str, note: str) -> bool:
    """Draw the latency, and the requests answered per second, over the rate at which they arrive.

    Return whether any trial has several rates.
    """
    swept = [(named, loads) for named in found if (loads := named.serving.swept)]
    if not swept:
        return False
    figure, (left, right) = canvas(_HEIGHT_INCHES, f"rates: {heading}", note, panels=2)
    for number, (named, loads) in enumerate(swept):
        color, rates = COLORS[number % len(COLORS)], [load.load.rate or 0.0 for load in loads]
        prefix = f"{shortened(named.name, limit=24)} " if len(swept) > 1 else ""
        for share, dashes in ((50, "-"), (99, "--")):
            seconds = [load.percentile_s(load.latency_s, share) for load in loads]
            points = [(rate, value) for rate, value in zip(rates, seconds, strict=True) if value is not None]
            left.plot(*zip(*points, strict=True) if points else ([], []), dashes, marker="o", markersize=3.5,
                      color=color, label=f"{prefix}p{share}")  # fmt: skip
        done = [(rate, load.request_throughput or 0.0) for rate, load in zip(rates, loads, strict=True)]
        right.plot(*zip(*done, strict=True), "-", marker="o", markersize=3.5, color=color, label=f"{prefix}answered")
        if named.serving.knee is not None:
            for axes in (left, right):
                axes.axvline(named.serving.knee, color=TARGET_COLOR, linewidth=0.9, linestyle=":", label="knee")
        as_they_arrive = "as many as arrive" if number == 0 else None
        right.plot([0, rates[-1]], [0, rates[-1]], color=FAINT_INK, linewidth=0.9, linestyle=":", label=as_they_arrive)
        limit = loads[0].limits.latency_s
        if number == 0 and limit is not None and limit <= 2 * left.get_ylim()[1]:
            left.axhline(limit, color=INK, linewidth=0.9, linestyle=":", label="limit")
    for axes, vertical in ((left, "seconds to the last token"), (right, "requests answered per second")):
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        _name(axes, "requests arriving per second", vertical)
        axes.legend(fontsize=7, edgecolor="none", framealpha=0.8)
    save(figure, path)
    return True


def _sound(load: LoadResult) -> list[float]:
    """Return the latencies of the requests that were answered as asked for, in rising order."""
    return sorted(s for s, one in zip(load.latency_s, load.status, strict=True) if s is not None and one == "ok")


def _label(named: Named, load: LoadResult, *, several: bool) -> str:
    return f"{load.load.name}: {named.name}" if several else load.load.name  # the end of a long name is left out


def _name(axes: "Axes", horizontal: str, vertical: str) -> None:
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
