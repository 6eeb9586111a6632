"""Horizontal bars as an interactive chart; `figures.bars_figure` draws the same bars as a PNG."""

from collections.abc import Sequence

from bench.report.canvas import COLORS, INTERVAL_COLOR, PUBLISHED_COLOR
from bench.report.figures import LEAST_WHISKER, Bar
from bench.report.tables import number_text
from bench.report.template import Chart, Trace, axis, chart, text, view

_ROW_PIXELS, _FRAME_PIXELS = 26, 70
_ROOM = 1.12
"""Axis length relative to the longest bar, with room for the numbers."""


def bar_chart(bars: Sequence[Bar], *, what: str, colors: Sequence[str] = COLORS[:1]) -> Chart:
    """Return horizontal bars in the given order; published ones are hatched, intervals are whiskers.

    `colors` are those of our bars; they repeat if there are too few.
    """
    height = _FRAME_PIXELS + _ROW_PIXELS * len(bars)
    scale = axis(what, range=[0, _ROOM * max(map(_end, bars)) or 1])
    return chart(
        view(
            "",
            [_trace(bars, what, colors), _whiskers(bars), _numbers(bars)],
            height=height,
            xaxis=scale,
            yaxis=_names(bars),
        )
    )


def _end(bar: Bar) -> float:
    return max(bar.value, *(bar.interval or (bar.value,)))


def _numbers(bars: Sequence[Bar]) -> Trace:
    """Return the numbers after the bars and their whiskers."""
    return {
        "mode": "text",
        "x": [_end(bar) for bar in bars],
        "y": list(range(len(bars))),
        "text": [f" <b>{number_text(bar.value)}</b>" if bar.ours else f" {number_text(bar.value)}" for bar in bars],
        "textposition": "middle right",
        "textfont": {"size": 11.5},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _names(bars: Sequence[Bar]) -> dict[str, object]:
    """Return an axis with a position for each bar; names need not be unique."""
    labels = [f"<b>{text(bar.name, limit=54)}</b>" if bar.ours else text(bar.name, limit=54) for bar in bars]
    places = list(range(len(bars)))
    return {"tickvals": places, "ticktext": labels, "range": [len(bars) - 0.4, -0.6], "showgrid": False, "ticks": ""}


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
