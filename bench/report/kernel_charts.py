"""The charts of a kernels page: rates and latencies over sizes, a curve for each kernel."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.report import labels
from bench.report.canvas import COLORS, INTERVAL_COLOR, INVALID_COLOR
from bench.report.curves import number
from bench.report.kernel_curves import COLLECTIVES, Curve, Point, attention, collectives, copies, gemms, rates, times
from bench.report.template import Charts, Trace, axis, chart, text, view
from bench.results.kernels import Measured

Values = Callable[[Measured], tuple[float, float, float]]
_MOST_TICKS = 6


def charts(measured: Sequence[Measured]) -> dict[str, Charts]:
    """Return the charts of each figure with their titles, by the name of the figure's file."""
    charts_of = {
        "gemm": _gemms(measured),
        "memcpy": _over_bytes("memcpy", copies(measured), is_wide=True),
        **{name: _over_bytes(name, collectives(measured, chosen)) for name, chosen in COLLECTIVES.items()},
        "attention": _attention(measured),
    }
    return {name: of_figure for name, of_figure in charts_of.items() if of_figure}


def _gemms(measured: Sequence[Measured]) -> Charts:
    charts_of: Charts = {}
    for of_precision in gemms(measured):
        first = of_precision.first
        traces = list(_traces(of_precision.curves, rates))
        if of_precision.single:
            traces.append(_marks(of_precision.single))
        places = [*_places(of_precision.curves), *(m for m, _ in of_precision.single)]
        shown = {"xaxis": axis("M", **_sizes(places, _count)), "yaxis": axis(first.point.unit, rangemode="tozero")}
        one_view = view("", traces, **shown, **_lines(first))
        charts_of[f"gemm_{of_precision.precision}"] = (of_precision.title, chart(one_view))
    return charts_of


def _marks(single: Sequence[Point]) -> Trace:
    return {
        "mode": "markers",
        "name": "other shapes",
        "x": [m for m, _ in single],
        "y": [number(one.rate) for _, one in single],
        "marker": {"color": INTERVAL_COLOR, "size": 6},
        "customdata": [text(one.point.name) for _, one in single],
        "hovertemplate": "%{customdata}: %{y:,.4g}<extra></extra>",
    }


def _over_bytes(prefix: str, of_kernels: Sequence[Curve], *, is_wide: bool = False) -> Charts:
    """Return latency and bandwidth over bytes; the host link and the memory of a device differ by orders of size."""
    if not of_kernels:
        return {}
    measured = [one for curve in of_kernels for _, one in curve.points]
    byte_axis = axis("bytes", **_sizes(_places(of_kernels), labels.bytes_text))
    latency = axis("microseconds", **_log([times(one) for one in measured]))
    speeds = _log([rates(one) for one in measured]) if is_wide else {"rangemode": "tozero"}
    rate = axis(measured[0].point.unit, **speeds)
    return {
        f"{prefix}_latency": (
            "latency",
            chart(view("", list(_traces(of_kernels, times)), xaxis=byte_axis, yaxis=latency)),
        ),
        f"{prefix}_rate": (
            "bandwidth" if is_wide else "bus bandwidth",
            chart(view("", list(_traces(of_kernels, rates)), xaxis=byte_axis, yaxis=rate)),
        ),
    }


def _attention(measured: Sequence[Measured]) -> Charts:
    charts_of: Charts = {}
    for way in ("forward", "backward"):
        if backends := attention(measured, way):
            first = backends[0].points[0][1]
            lengths = axis("sequence length (tokens)", **_sizes(_places(backends), _count))
            unit, traces = axis(first.point.unit, rangemode="tozero"), list(_traces(backends, rates))
            one_view = view("", traces, xaxis=lengths, yaxis=unit, **_lines(first))
            charts_of[f"attention_{way}"] = (way, chart(one_view))
    return charts_of


def _places(of_kernels: Sequence[Curve]) -> list[float]:
    return [place for curve in of_kernels for place, _ in curve.points]


def _count(size: float) -> str:
    return f"{size:,.0f}"


def _traces(of_kernels: Sequence[Curve], values: Values) -> Iterator[Trace]:
    """Yield each curve with its shade from the 10th to the 90th percentile."""
    for place, curve in enumerate(of_kernels):
        color, group = COLORS[place % len(COLORS)], {"legendgroup": text(curve.name)}
        x = [at for at, _ in curve.points]
        low, middle, high = (
            [*map(number, each)] for each in zip(*(values(one) for _, one in curve.points), strict=True)
        )
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False, "x": x, **group}
        yield edge | {"y": low}
        yield edge | {"y": high, "fill": "tonexty", "fillcolor": _shade(color)}
        yield {
            "mode": "lines+markers",
            "name": text(curve.name),
            "x": x,
            "y": middle,
            "line": {"color": color, "width": 1.8, "dash": "dash" if curve.name.startswith("unaligned") else "solid"},
            "marker": {"color": color, "size": 6},
            "customdata": [
                [a, b, text(one.point.name)] for a, b, (_, one) in zip(low, high, curve.points, strict=True)
            ],
            "hovertemplate": "%{customdata[2]}<br><b>%{y:,.4g}</b>, p10 to p90 %{customdata[0]:,.4g} to "
            f"%{{customdata[1]:,.4g}}<extra>{text(curve.name)}</extra>",
            **group,
        }


def _shade(color: str) -> str:
    red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.16)"


def _lines(one: Measured) -> dict[str, Any]:
    """Return the data sheet's peak and the best known rate as lines."""
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1}
    return {
        "shapes": [
            line
            | {"y0": rate, "y1": rate, "line": {"color": color, "width": 1.2, "dash": "dot"}}
            | {"label": {"text": name, "textposition": "start", "font": {"color": color, "size": 11}}}
            for rate, name, color in (
                (one.point.peak, "peak", INTERVAL_COLOR),
                (one.point.limit, "best known", INVALID_COLOR),
            )
            if rate is not None
        ]
    }


def _sizes(sizes: Sequence[float], name: Callable[[float], str]) -> dict[str, Any]:
    """Return a logarithmic axis with some of the measured sizes as ticks."""
    ticks = sorted(set(sizes))
    if not ticks or ticks[0] <= 0 or ticks[0] == ticks[-1]:
        return {"tickvals": ticks, "ticktext": [name(tick) for tick in ticks]}
    kept: list[float] = []
    least = math.log(ticks[-1] / ticks[0]) / _MOST_TICKS
    for tick in ticks:
        if not kept or math.log(tick / kept[-1]) >= least:
            kept.append(tick)
    return {"type": "log", "tickvals": kept, "ticktext": [name(tick) for tick in kept]}


def _log(values: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    positive = [value for each in values for value in each if 0 < value < math.inf]
    return labels.log_axis(min(positive), max(positive)) if positive else {}
