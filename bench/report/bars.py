"""Horizontal bars as an interactive chart; `figures.bars_figure` draws the same bars as a PNG."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.contract.modules import TITLES, ModuleTimes
from bench.report import labels
from bench.report.canvas import COLORS, INTERVAL_COLOR, PUBLISHED_COLOR
from bench.report.figures import COLORS as MODULE_COLORS
from bench.report.figures import LEAST_WHISKER, OTHER, OTHER_COLOR, Bar, segments
from bench.report.tables import number_text
from bench.report.template import Chart, Trace, axis, chart, text, view
from bench.results.modules import phases

if TYPE_CHECKING:
    from bench.mlperf.published import Convergence

_ROW_PIXELS, _FRAME_PIXELS, _NARROW_ROW_PIXELS = 26, 70, 38
_LETTER_PIXELS = 7
_FULL = 1.03
"""Axis length relative to the longest bar."""


def bar_chart(bars: Sequence[Bar], *, what: str, colors: Sequence[str] = COLORS[:1]) -> Chart:
    """Return horizontal bars in the given order; published ones are hatched, intervals are whiskers.

    `colors` are those of our bars; they repeat if there are too few. The numbers are a column at the right.
    """
    scale = axis(what, range=[0, _FULL * max(map(_end, bars)) or 1])
    names = _names(bars)
    texts = [f"<b>{number_text(bar.value)}</b>" if bar.ours else number_text(bar.value) for bar in bars]
    return chart(
        view(
            "",
            [_trace(bars, what, colors), _whiskers(bars)],
            narrow=narrow(names, _FRAME_PIXELS + _NARROW_ROW_PIXELS * len(bars)),
            height=_FRAME_PIXELS + _ROW_PIXELS * len(bars),
            xaxis=scale,
            yaxis=names,
            **number_column(texts, range(len(bars))),
        )
    )


def names_axis(names: Sequence[str], places: Sequence[float], *, bottom: float, top: float) -> dict[str, Any]:
    """Return a vertical axis with a name at each place, from the top down; names need not be unique."""
    ticks = {"tickvals": list(places), "ticktext": list(names)}
    return {**ticks, "range": [bottom, top], "showgrid": False, "ticks": ""}


def narrow(names: Mapping[str, Any], height: int, *, lines: int = 2) -> dict[str, Any]:
    """Return what a narrow screen changes in a chart with such an axis: its height, and the names in a few lines."""
    return {"height": height, "yaxis": {"ticktext": [labels.wrapped(name, lines=lines) for name in names["ticktext"]]}}


def number_column(texts: Sequence[str], places: Sequence[float]) -> dict[str, Any]:
    """Return layout for numbers in a column at the right of a chart, so that none is taken for the end of a whisker."""
    shown = {"xref": "paper", "x": 1, "xanchor": "left", "xshift": 6, "showarrow": False, "font": {"size": 11.5}}
    notes = [shown | {"yref": "y", "y": y, "text": text} for text, y in zip(texts, places, strict=True)]
    letters = max((len(re.sub("<[^>]*>|&[a-z]+;", "", text)) for text in texts), default=0)
    return {"annotations": notes, "margin": {"r": 14 + _LETTER_PIXELS * letters}}


def _end(bar: Bar) -> float:
    return max(bar.value, *(bar.interval or (bar.value,)))


def _names(bars: Sequence[Bar]) -> dict[str, Any]:
    names = [f"<b>{text(bar.name, limit=54)}</b>" if bar.ours else text(bar.name, limit=54) for bar in bars]
    return names_axis(names, range(len(bars)), bottom=len(bars) - 0.4, top=-0.6)


def _trace(bars: Sequence[Bar], what: str, colors: Sequence[str]) -> Trace:
    hatch = {
        "shape": ["" if bar.ours else "/" for bar in bars],
        "fillmode": "overlay",
        "size": 5,
        "solidity": 0.3,
    }
    return {
        "type": "bar",
        "orientation": "h",
        "x": [bar.value for bar in bars],
        "y": list(range(len(bars))),
        "marker": {
            "color": [colors[n % len(colors)] if bar.ours else PUBLISHED_COLOR for n, bar in enumerate(bars)],
            "pattern": hatch,
        },
        "customdata": [_hover(bar) for bar in bars],
        "hovertemplate": f"%{{customdata}}<extra>{text(what)}</extra>",
        "showlegend": False,
    }


def _whiskers(bars: Sequence[Bar]) -> Trace:
    """Return the whiskers of intervals that are wide enough to see."""
    least = LEAST_WHISKER * max(map(_end, bars))
    seen = [(row, bar.value, bar.interval) for row, bar in enumerate(bars) if bar.interval]
    wide = [(row, value, low, high) for row, value, (low, high) in seen if high - low > least]
    return {
        "mode": "markers",
        "x": [value for _, value, *_ in wide],
        "y": [row for row, *_ in wide],
        "marker": {"size": 0.1, "color": INTERVAL_COLOR},
        "error_x": {
            "array": [high - value for _, value, _, high in wide],
            "arrayminus": [value - low for _, value, low, _ in wide],
            "color": INTERVAL_COLOR,
            "thickness": 1.5,
        },
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _hover(bar: Bar) -> str:
    ends = [number_text(end) for end in bar.interval or ()]
    interval = f", 90 % interval {ends[0]} to {ends[1]}" if ends else ""
    origin = "" if bar.ours else ", published"
    return f"{text(bar.name)}<br><b>{number_text(bar.value)}</b>{interval}{origin} {text(bar.remark)}".rstrip()


def samples_chart(ours: Mapping[int, int], known: "Convergence") -> Chart:
    """Return the distribution of samples to target, of our trials and of published runs."""
    num_ours = sum(ours.values())
    our_shares, published = {samples: count / num_ours for samples, count in ours.items()}, dict(known.shares)
    ticks = sorted({*our_shares, *published})
    traces = [
        {
            "type": "bar",
            "name": text(name),
            "x": [f"{tick:,.0f}" for tick in ticks],
            "y": [100 * shares.get(tick, 0) for tick in ticks],
            "marker": {"color": color, "pattern": {"shape": hatch, "fillmode": "overlay", "size": 5, "solidity": 0.3}},
            "hovertemplate": f"%{{y:.1f}} % at %{{x}} samples<extra>{text(name)}</extra>",
        }
        for shares, name, color, hatch in (
            (our_shares, f"this set, n = {num_ours}", COLORS[0], ""),
            (published, f"published {known.kind}, n = {known.num_runs:,}", PUBLISHED_COLOR, "/"),
        )
    ]
    return chart(
        view("", traces, xaxis=axis("samples to target", type="category"), yaxis=axis("share of runs (%)"), height=300)
    )


def modules_chart(profiles: Sequence[tuple[str, ModuleTimes]]) -> Chart:
    """Return profiles as stacked bars, one for each phase, in milliseconds per step."""
    rows = [
        (f"{name} {phase}" if len(profiles) > 1 else str(phase), segments(times, phase))
        for name, times in profiles
        for phase in phases(times)
    ]
    colors = {TITLES[part]: color for part, color in MODULE_COLORS.items()} | {OTHER: OTHER_COLOR}
    places = list(range(len(rows)))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": part,
            "x": [parts.get(part, 0) for _, parts in rows],
            "y": places,
            "marker": {"color": color},
            "hovertemplate": f"%{{x:,.2f}} ms<extra>{text(part)}</extra>",
        }
        for part, color in colors.items()
        if any(part in parts for _, parts in rows)
    ]
    names = names_axis([text(name, limit=30) for name, _ in rows], places, bottom=len(rows) - 0.5, top=-0.5)
    shown = {"barmode": "stack", "height": 150 + 44 * len(rows), "xaxis": axis("ms per step"), "yaxis": names}
    return chart(view("", traces, narrow=narrow(names, 220 + 60 * len(rows)), **shown))
