"""Scaling charts of a study: rates over the number of GPUs or nodes, compared with ideal scaling."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.report.canvas import COLORS, INTERVAL_COLOR, canvas, save
from bench.report.cells import cell_text
from bench.report.study.bars import half_width_of_mean
from bench.report.study.layout import heading, letters_of
from bench.report.tables import number_text, sentence
from bench.report.template import Chart, Trace, axis, chart, text, view
from bench.results.study import Column, Row, StudyResult

if TYPE_CHECKING:
    from pathlib import Path

COUNTS = ("gpus", "num_gpus", "nodes", "num_nodes", "ranks", "num_ranks")
"""Labels whose values are counts of GPUs, nodes or ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A rate at a count."""

    count: int
    value: float
    half_width: float
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The rates of arms that differ only in the count, or of a publication."""

    name: str
    color: str
    is_published: bool
    points: tuple[Point, ...]

    def ideal(self, count: int, *, is_per_gpu: bool) -> float:
        """Return the rate at a count if each GPU kept its rate at the first point."""
        first = self.points[0]
        return first.value if is_per_gpu else first.value * count / first.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """One rate over counts."""

    title: str
    what: str
    axis: str
    is_per_gpu: bool
    lines: tuple[Line, ...]

    @property
    def counts(self) -> list[int]:
        return sorted({point.count for line in self.lines for point in line.points})


def scalings_of(result: StudyResult) -> tuple[Scaling, ...]:
    """Return the scaling of each rate, if arms differ in the number of GPUs or nodes."""
    names = dict.fromkeys(name for row in result.rows for name in row.labels if name.lower() in COUNTS)
    return tuple(
        scaling
        for name in names
        for column in result.columns
        if "/s" in column.unit and (scaling := _scaling(result, name, column)).lines
    )


def _scaling(result: StudyResult, name: str, column: Column) -> Scaling:
    groups: dict[str, list[tuple[int, Row]]] = {}
    for row in result.rows:
        if match := re.search(r"\d+", row.labels.get(name, "")):
            others = ", ".join(value for label, value in row.labels.items() if label != name)
            groups.setdefault(others, []).append((int(match[0]), row))
    lines = [
        line for place, others in enumerate(groups) for line in _lines(result, column, others, groups[others], place)
    ]
    return Scaling(
        title=sentence(f"{column.title} by {name}"),
        what=heading(column),
        axis=name,
        is_per_gpu=column.unit.endswith("/GPU"),
        lines=tuple(line for line in lines if len(line.points) > 1),
    )


def _lines(result: StudyResult, column: Column, name: str, rows: list[tuple[int, Row]], place: int) -> Iterator[Line]:
    color, rows = COLORS[place % len(COLORS)], sorted(rows, key=lambda of_count: of_count[0])
    cells = [(count, row.cells.get(column.measurement)) for count, row in rows]
    yield Line(
        name=name or "measured",
        color=color,
        is_published=False,
        points=tuple(
            Point(
                count=count,
                value=c.value,
                half_width=half_width_of_mean(c.values),
                details=f"{cell_text(c)}, n = {c.n}",
            )
            for count, c in cells
            if c is not None and c.value is not None
        ),
    )
    for letter_name, letter in letters_of(result).items():
        figures = [(n, one) for n, row in rows for one in row.published.get(column.measurement, ())]
        points = [
            Point(count=count, value=one.value, half_width=0, details=f"{number_text(one.value)}, published")
            for count, one in figures
            if one.publication == letter_name and one.value is not None
        ]
        title = f"{name}, published [{letter}]" if name else f"published [{letter}]"
        yield Line(name=title, color=color, is_published=True, points=tuple(points))


def scaling_chart(scaling: Scaling) -> Chart:
    traces = [trace for line in scaling.lines for trace in _traces(scaling, line)]
    counts = axis(scaling.axis, tickvals=scaling.counts, range=[0, 1.06 * max(scaling.counts)])
    return chart(view("", traces, xaxis=counts, yaxis=axis(scaling.what, rangemode="tozero"), height=400))


def _traces(scaling: Scaling, line: Line) -> Iterator[Trace]:
    dash, symbol = ("dot", "circle-open") if line.is_published else ("solid", "circle")
    yield {
        "mode": "lines+markers",
        "name": text(line.name),
        "x": [point.count for point in line.points],
        "y": [point.value for point in line.points],
        "line": {"color": line.color, "width": 2, "dash": dash},
        "marker": {"color": line.color, "size": 8, "symbol": symbol},
        "error_y": {
            "array": [point.half_width for point in line.points],
            "color": INTERVAL_COLOR,
            "thickness": 1.4,
            "visible": any(point.half_width for point in line.points),
        },
        "customdata": [_share(scaling, line, point) for point in line.points],
        "hovertemplate": f"%{{customdata}}<extra>{text(line.name)}</extra>",
    }
    if not line.is_published:
        ends = [line.points[0].count, line.points[-1].count]
        yield {
            "mode": "lines",
            "name": "ideal",
            "legendgroup": "ideal",
            "showlegend": line is scaling.lines[0],
            "x": ends,
            "y": [line.ideal(count, is_per_gpu=scaling.is_per_gpu) for count in ends],
            "line": {"color": line.color, "width": 1.2, "dash": "dash"},
            "opacity": 0.6,
            "hovertemplate": "ideal: %{y:,.4g}<extra></extra>",
        }


def _share(scaling: Scaling, line: Line, point: Point) -> str:
    share = 100 * point.value / line.ideal(point.count, is_per_gpu=scaling.is_per_gpu)
    return f"{text(scaling.axis)} = {point.count}: <b>{text(point.details)}</b><br>{share:.1f} % of ideal"


def draw_scaling(scaling: Scaling, path: "Path", *, note: str) -> None:
    figure, (axes,) = canvas(4.2, scaling.title, note)
    for line in scaling.lines:
        x, y = [point.count for point in line.points], [point.value for point in line.points]
        style, fill = ("o:", "#ffffff") if line.is_published else ("o-", line.color)
        axes.errorbar(
            x, y, [point.half_width for point in line.points], fmt=style, color=line.color, ecolor=INTERVAL_COLOR,
            markerfacecolor=fill, markersize=5, capsize=2.5, label=line.name,
        )  # fmt: skip
        if not line.is_published:
            ideal = [line.ideal(count, is_per_gpu=scaling.is_per_gpu) for count in x]
            label = (
                "ideal" if line is scaling.lines[0] else "_"
            )  # matplotlib omits names that begin with _ from the legend
            axes.plot(x, ideal, "--", color=line.color, linewidth=1, alpha=0.6, label=label)
    axes.set_xticks(scaling.counts)
    axes.set_xlim(0, 1.06 * max(scaling.counts))
    axes.set_ylim(bottom=0)
    axes.set_xlabel(scaling.axis, parse_math=False)
    axes.set_ylabel(scaling.what, parse_math=False)
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.legend(loc="best", frameon=False, fontsize=8)
    save(figure, path)
