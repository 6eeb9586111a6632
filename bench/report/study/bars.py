"""Bar charts of a study: the means of arms with their intervals, next to published figures."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report.bars import names_axis, narrow, number_column
from bench.report.canvas import COLORS, INTERVAL_COLOR, canvas, pale, save, shortened
from bench.report.cells import cell_text, in_column_unit
from bench.report.study.layout import column_heading, heading, letters_of, remark
from bench.report.tables import number_text, sentence
from bench.report.template import Chart, Trace, axis, chart, text, view
from bench.results.study import Cell, Column, Mark, Published, Row, StudyResult, Table

CONFIDENCE = 0.95
_GROUP_GAP = 0.7
"""Gap between groups, as a multiple of a bar's height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar; without a value only its text is drawn."""

    value: float | None
    text: str
    details: str
    """The tooltip."""
    half_width: float = 0.0
    """Half-width of the interval of the mean; zero if there is none."""
    values: tuple[float, ...] = ()
    """The value of each run."""
    is_measured: bool = True

    @property
    def end(self) -> float:
        """The maximum of the bar, its whisker and its dots."""
        return max([(self.value or 0.0) + self.half_width, *self.values])


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Bars of one style, one for each group."""

    name: str
    color: str
    bars: tuple[Bar | None, ...]
    publication: int | None = None
    """The index of its publication in the study; None for our measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Groups of bars."""

    title: str
    what: str
    groups: tuple[str, ...]
    series: tuple[Series, ...]

    @property
    def has_published(self) -> bool:
        return any(series.publication is not None for series in self.series)

    def places(self) -> Iterator[tuple[int, Series, Bar, float]]:
        """Yield each bar from top to bottom with its group's number and its y position, in bars."""
        y = 0.0
        for group in range(len(self.groups)):
            present = [(series, bar) for series in self.series if (bar := series.bars[group]) is not None]
            for place, (series, bar) in enumerate(present):
                yield group, series, bar, y + place
            y += max(1, len(present)) + _GROUP_GAP

    def ticks(self) -> dict[str, float]:
        """Return the y position of each group's centre, by the group's name."""
        heights: dict[int, list[float]] = {}
        for group, _, _, y in self.places():
            heights.setdefault(group, []).append(y)
        return {self.groups[group]: (ys[0] + ys[-1]) / 2 for group, ys in heights.items()}


def bars_of(result: StudyResult) -> tuple[Bars, ...]:
    """Return the bars of each table, one group per line; without tables, of each measurement by arm.

    Coefficients have no bars: those of their values show the same.
    """
    coefficients = {name for row in result.rows for name, cell in row.cells.items() if cell.text}
    if result.tables:
        tables = [table for table in result.tables if table.column.measurement not in coefficients]
        charts = [_table_bars(result, table) for table in tables]
    else:
        columns = [column for column in result.columns if column.measurement not in coefficients]
        charts = [_column_bars(result, column) for column in columns]
    return tuple(bars for bars in charts if any(bar and bar.value is not None for s in bars.series for bar in s.bars))


def _column_bars(result: StudyResult, column: Column) -> Bars:
    groups = tuple(row.arm for row in result.rows)
    series = _series(result, column, "measured", list(result.rows), COLORS[0])
    return Bars(title=sentence(column.title), what=heading(column), groups=groups, series=tuple(series))


def _table_bars(result: StudyResult, table: Table) -> Bars:
    series: list[Series] = []
    for place, labels in enumerate(table.columns):
        rows = [result.row(arm) if (arm := arms[place]) is not None else None for _, arms in table.rows]
        series += _series(
            result,
            table.column,
            ", ".join(map(column_heading, table.column_labels, labels)),
            rows,
            COLORS[place % len(COLORS)],
        )
    groups = tuple(", ".join(labels) for labels, _ in table.rows)
    return Bars(title=table.title, what=heading(table.column), groups=groups, series=tuple(series))


def _series(result: StudyResult, column: Column, name: str, rows: Sequence[Row | None], color: str) -> Iterator[Series]:
    """Yield the series of our measurements, then those of each publication for the same arms."""
    key, unit = column.measurement, column.unit
    cells = [row.cells.get(key) if row else None for row in rows]
    if any(cells):
        bars = tuple(_measured(cell, unit) if cell else None for cell in cells)
        yield Series(name=name, color=color, bars=bars)
    figures = [row.published.get(key, ()) if row else () for row in rows]
    letters, hardware = letters_of(result), {one.name: one.hardware for one in result.publications}
    for publication in dict.fromkeys(one.publication for of_row in figures for one in of_row):
        chosen = [next((one for one in of_row if one.publication == publication), None) for of_row in figures]
        published = tuple(_published(one, unit) if one and one.value is not None else None for one in chosen)
        title = f"published [{letters[publication]}]"
        full = f"{title}, {hardware[publication]}" if name == "measured" else f"{name}, {title}"
        if any(published):
            yield Series(name=full, color=pale(color), bars=published, publication=list(letters).index(publication))


def _measured(cell: Cell, unit: str) -> Bar:
    half_width = half_width_of_mean(cell.values)
    details = [f"<b>{text(cell_text(cell))}</b> {text(unit)}", f"n = {cell.n}" if cell.n else "", text(cell.reason)]
    if half_width:
        details.append(f"95 % interval of the mean ± {number_text(half_width)}")
        details.append("runs: " + ", ".join(number_text(value) for value in cell.values))
    return Bar(
        value=cell.value,
        text=cell_text(cell) if cell.value is None or cell.mark is not Mark.measured else number_text(cell.value),
        details="<br>".join(filter(None, details)),
        half_width=half_width,
        values=cell.values,
        is_measured=cell.mark is Mark.measured,
    )


def _published(figure: Published, unit: str) -> Bar:
    shown, why = in_column_unit(figure), remark(figure)
    details = f"<b>{text(shown)}</b> {text(unit)}, published" + (f"<br>{text(why)}" if why else "")
    return Bar(value=figure.value, text=shown, details=details)


def half_width_of_mean(values: Sequence[float]) -> float:
    """Return the half-width of the 95 % t-interval of the mean of runs; zero for fewer than two."""
    if len(values) < 2:
        return 0.0
    from statistics import stdev

    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


_BAR_PIXELS, _FRAME_PIXELS, _BAR_INCHES, _FRAME_INCHES = 19, 74, 0.17, 1.45
_NARROW_BAR_PIXELS, _THICKNESS, _FULL = 24, 0.88, 1.03
"""Thickness of a bar; axis length relative to the longest bar."""
_LEGEND_LETTERS = 105

Placed = Sequence[tuple[Bar, float]]


def bars_chart(bars: Bars) -> Chart:
    """Return the bars as a chart. A bar without a value shows only its text."""
    placed = [(bar, y) for _, _, bar, y in bars.places()]
    low = placed[-1][1] + 0.7
    ticks = bars.ticks()
    names = names_axis([text(name, limit=54) for name in ticks], [*ticks.values()], bottom=low, top=-0.7)
    traces = [_bars(series, bars) for series in bars.series] + [_whiskers(placed), _dots(placed)]
    scale = axis(bars.what, range=[0, _FULL * max(bar.end for bar, _ in placed) or 1])
    frame = _FRAME_PIXELS + 24 * (len(bars.series) > 1)
    narrow_height = round(frame + 24 * len(bars.series) + max(_NARROW_BAR_PIXELS * low, 34 * len(bars.groups)))
    numbers = number_column([text(bar.text) for bar, _ in placed], [y for _, y in placed])
    shown = {"xaxis": scale, "yaxis": names, "barmode": "overlay", "height": round(frame + _BAR_PIXELS * low)}
    return chart(view("", traces, narrow=narrow(names, narrow_height), **shown, **numbers))


def _bars(series: Series, bars: Bars) -> Trace:
    placed = [(bars.groups[group], bar, y) for group, owner, bar, y in bars.places() if owner is series]
    shape = [_HATCHES[_hatch(series, bar)][0] for _, bar, _ in placed]
    return {
        "type": "bar",
        "orientation": "h",
        "name": text(series.name),
        "y": [y for *_, y in placed],
        "x": [bar.value or 0 for _, bar, _ in placed],
        "width": _THICKNESS,
        "marker": {
            "color": series.color,
            "pattern": {"shape": shape, "fillmode": "overlay", "fgcolor": "#fff", "size": 6, "solidity": 0.3},
        },
        "customdata": [f"{text(group)}, {text(series.name)}<br>{bar.details}" for group, bar, _ in placed],
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


def _silent(x: Sequence[float | None], placed: Placed, **more: Any) -> Trace:
    """Return a trace without tooltip and legend entry."""
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
        at = axes.get_yaxis_transform()  # a column of numbers at the right: none is taken for the end of a whisker
        label = axes.annotate(
            bar.text, (1, y), (4, 0), xycoords=at, textcoords="offset points", va="center", fontsize=7.5
        )
        label.set_parse_math(False)
    ticks = bars.ticks()
    axes.set_yticks([*ticks.values()], [shortened(name) for name in ticks], fontsize=8.5, parse_math=False)
    axes.set_ylim(low, -0.7)
    axes.set_xlim(0, _FULL * max(bar.end for _, _, bar, _ in places) or 1)
    axes.set_xlabel(bars.what, parse_math=False)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    if rows:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=_columns(bars), frameon=False, fontsize=8)
    save(figure, path)


def _columns(bars: Bars) -> int:
    """Return the number of columns of the legend."""
    return max(1, min(3, _LEGEND_LETTERS // (6 + max(len(series.name) for series in bars.series))))


def _look(series: Series, bar: Bar) -> dict[str, Any]:
    hatch = _HATCHES[_hatch(series, bar)][1]
    return {"hatch": hatch, "edgecolor": "#ffffff", "linewidth": 0} if hatch else {}


_HATCHES = (("", ""), (".", "...."), ("/", "////"), ("\\", r"\\\\"), ("x", "xxxx"), ("-", "----"), ("|", "||||"))
"""Hatches of plotly and matplotlib: measured, calculated or estimated, then one for each publication."""


def _hatch(series: Series, bar: Bar) -> int:
    """Return the hatch that distinguishes a bar from others of its colour, also in greyscale."""
    if series.publication is None:
        return 0 if bar.is_measured else 1
    return 2 + series.publication % (len(_HATCHES) - 2)
