"""The bars of a study on a page and as a PNG: dots are runs, whiskers the interval of their mean."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.canvas import canvas, save, shortened
from bench.report.interactive import Chart, Trace, axis, chart, text, view
from bench.report.palette import INTERVAL_COLOR
from bench.report.study.bars import Bar, Bars, Series

_BAR_PIXELS, _FRAME_PIXELS, _BAR_INCHES, _FRAME_INCHES = 19, 74, 0.17, 1.45
_THICKNESS, _ROOM = 0.88, 1.13
"""Of a bar; of the longest bar, with the number behind it."""
_LEGEND_LETTERS = 105

Placed = Sequence[tuple[Bar, float]]


def bars_chart(bars: Bars) -> Chart:
    """Return the bars as a chart. A bar without a value is its text."""
    placed = [(bar, y) for _, _, bar, y in bars.places()]
    low = placed[-1][1] + 0.7
    names = {
        "tickvals": list(bars.ticks().values()),
        "ticktext": [text(name, limit=54) for name in bars.ticks()],
        "range": [low, -0.7],
        "showgrid": False,
        "ticks": "",
    }
    traces = [_bars(series, bars) for series in bars.series] + [_whiskers(placed), _dots(placed), _numbers(placed)]
    scale = axis(bars.what, range=[0, _ROOM * max(bar.end for bar, _ in placed) or 1])
    height = _FRAME_PIXELS + _BAR_PIXELS * low + 24 * (len(bars.series) > 1)
    return chart(view("", traces, height=round(height), barmode="overlay", xaxis=scale, yaxis=names))


def _bars(series: Series, bars: Bars) -> Trace:
    drawn = [(bars.groups[group], bar, y) for group, of, bar, y in bars.places() if of is series]
    shape = [_HATCHES[_hatch(series, bar)][0] for _, bar, _ in drawn]
    return {
        "type": "bar",
        "orientation": "h",
        "name": text(series.name),
        "y": [y for *_, y in drawn],
        "x": [bar.value or 0 for _, bar, _ in drawn],
        "width": _THICKNESS,
        "marker": {
            "color": series.color,
            "pattern": {"shape": shape, "fillmode": "overlay", "fgcolor": "#fff", "size": 6, "solidity": 0.3},
        },
        "customdata": [f"{text(group)}, {text(series.name)}<br>{bar.details}" for group, bar, _ in drawn],
        "hovertemplate": "%{customdata}<extra></extra>",
        "showlegend": len(bars.series) > 1,
    }


def _whiskers(placed: Placed) -> Trace:
    wide = [(bar, y) for bar, y in placed if bar.half_width]
    whisker = {"array": [bar.half_width for bar, _ in wide], "color": INTERVAL_COLOR, "thickness": 1.3, "width": 4}
    marker = {"size": 0.1, "color": INTERVAL_COLOR}
    return _silent([bar.value for bar, _ in wide], wide, mode="markers", error_x=whisker, marker=marker)


def _dots(placed: Placed) -> Trace:
    dots = [(value, bar, y) for bar, y in placed if len(bar.values) > 1 for value in bar.values]
    marker = {"size": 4.5, "color": "#fff", "line": {"color": INTERVAL_COLOR, "width": 1}}
    return _silent([value for value, *_ in dots], [(bar, y) for _, bar, y in dots], mode="markers", marker=marker)


def _numbers(placed: Placed) -> Trace:
    words = [f" {text(bar.text)}" for bar, _ in placed]
    more = {"text": words, "textposition": "middle right", "textfont": {"size": 11}}
    return _silent([bar.end for bar, _ in placed], placed, mode="text", **more)


def _silent(x: Sequence[float | None], placed: Placed, **more: Any) -> Trace:
    """Return a trace that neither the pointer nor the legend knows."""
    return {"x": list(x), "y": [y for _, y in placed], "hoverinfo": "skip", "showlegend": False, **more}


def draw_bars(bars: Bars, path: Path, *, note: str) -> None:
    """Draw the bars as a PNG."""
    places = list(bars.places())
    low = places[-1][3] + 0.7
    rows = -(-len(bars.series) // _columns(bars)) if len(bars.series) > 1 else 0
    figure, (axes,) = canvas(_FRAME_INCHES + _BAR_INCHES * (low + 1.3 * rows), bars.title, note)
    for series in bars.series:
        first = next(bar for bar in series.bars if bar)
        axes.barh([0], [0], color=series.color, label=series.name, **_look(series, first))
    for _, series, bar, y in places:
        axes.barh([y], [bar.value or 0], _THICKNESS, color=series.color, **_look(series, bar))
        if bar.half_width:
            axes.errorbar([bar.value or 0], [y], xerr=bar.half_width, color=INTERVAL_COLOR, capsize=2.5, linewidth=1.1)
        if len(bar.values) > 1:
            axes.plot(bar.values, [y] * len(bar.values), "o", color="w", markeredgecolor=INTERVAL_COLOR, markersize=2.8)
        words = axes.annotate(bar.text, (bar.end, y), (4, 0), textcoords="offset points", va="center", fontsize=7.5)
        words.set_parse_math(False)
    ticks = bars.ticks()
    axes.set_yticks([*ticks.values()], [shortened(name) for name in ticks], fontsize=8.5, parse_math=False)
    axes.set_ylim(low, -0.7)
    axes.set_xlim(0, _ROOM * max(bar.end for _, _, bar, _ in places) or 1)
    axes.set_xlabel(bars.what, parse_math=False)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    if rows:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=_columns(bars), frameon=False, fontsize=8)
    save(figure, path)


def _columns(bars: Bars) -> int:
    """Return how many names of the legend stand side by side."""
    return max(1, min(3, _LEGEND_LETTERS // (6 + max(len(series.name) for series in bars.series))))


def _look(series: Series, bar: Bar) -> dict[str, Any]:
    hatch = _HATCHES[_hatch(series, bar)][1]
    return {"hatch": hatch, "edgecolor": "#ffffff", "linewidth": 0} if hatch else {}


_HATCHES = (("", ""), (".", "...."), ("/", "////"), ("\\", r"\\\\"), ("x", "xxxx"), ("-", "----"), ("|", "||||"))
"""Of plotly and of matplotlib: what was measured, what was calculated or estimated, and publications in turn."""


def _hatch(series: Series, bar: Bar) -> int:
    """Return which hatch tells a bar from others of its colour, in grey too."""
    if series.publication is None:
        return 0 if bar.is_measured else 1
    return 2 + series.publication % (len(_HATCHES) - 2)
