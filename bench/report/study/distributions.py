"""Cumulative distributions of a study: the share of requests answered within a time, a curve for each arm.

A figure has the arms of one line of the study's first table, such as all servers of one model, so that the same place
in the table has the same colour in every figure. Arms that are in no table share a figure, as all arms do without one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report.canvas import COLORS, canvas, save, shortened
from bench.report.curves import distribution, number
from bench.report.study.layout import column_heading
from bench.report.template import Chart, axis, chart, text, view
from bench.results.kind import KINDS, Judged
from bench.results.measurement import Distribution
from bench.results.study import StudyResult

_MOST_CURVES = 12
"""More could not be distinguished."""
_DASHES = (("-", "solid"), ("--", "dash"))
"""Of the first curves, and of those that have their colours again: matplotlib's name and plotly's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The distribution of one arm, over the requests of all of its runs."""

    name: str
    place: int
    """The number of its colour."""
    values: tuple[float, ...]
    """Of the requests that were answered, in seconds."""
    total: int
    """All requests."""

    @property
    def points(self) -> list[tuple[float, float]]:
        """Return (seconds, percentage of all requests); without failed requests the last one is 100 %."""
        answered = len(self.values) / self.total
        return [(seconds, answered * percent) for seconds, percent in distribution(self.values)]

    @property
    def color(self) -> str:
        return COLORS[self.place % len(COLORS)]

    @property
    def dashes(self) -> tuple[str, str]:
        return _DASHES[self.place // len(COLORS) % len(_DASHES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """The curves of one figure."""

    title: str
    axis: str
    curves: tuple[Curve, ...]


def distributions_of(result: StudyResult, runs: Mapping[str, Sequence[Judged]]) -> list[Distributions]:
    """Return the figures with at least one curve; `runs` has the logs of each arm."""
    own = {arm: _pooled(logs) for arm, logs in runs.items()}
    names = dict.fromkeys(name for of_arm in own.values() for name in of_arm)
    figures = []
    for title, arms in _groups(result):
        for name in names:
            there = [(label, place, own[arm][name]) for label, place, arm in arms if name in own.get(arm, {})]
            curves = [
                Curve(name=label, place=place, values=one.values, total=one.total) for label, place, one in there
            ][:_MOST_CURVES]
            if curves:
                first = there[0][2]
                about = f"{first.title}: {title}" if title else first.title
                figures.append(Distributions(title=about, axis=first.axis, curves=tuple(curves)))
    return figures


def _pooled(logs: Sequence[Judged]) -> dict[str, Distribution]:
    """Return the distributions of an arm by title, with the requests of all runs together."""
    pooled: dict[str, Distribution] = {}
    for log in logs:
        of_kind = KINDS[log.kind].distributions
        for one in of_kind(log.of_kind) if of_kind else ():
            before = pooled.get(one.title)
            pooled[one.title] = one if before is None else before.with_more(one)
    return pooled


def _groups(result: StudyResult) -> Iterator[tuple[str, list[tuple[str, int, str]]]]:
    """Yield the title of each figure, and its arms with label and place in the table."""
    rest = [row.arm for row in result.rows]
    for table in result.tables[:1]:
        titles = [", ".join(map(column_heading, table.column_labels, one)) for one in table.columns]
        for labels, arms in table.rows:
            there = [(titles[place] or arm, place, arm) for place, arm in enumerate(arms) if arm is not None]
            rest = [arm for arm in rest if arm not in [name for *_, name in there]]
            yield ", ".join(map(column_heading, table.row_labels, labels)), there
    yield "", [(arm, place, arm) for place, arm in enumerate(rest)]


def draw_distributions(figure_of: Distributions, path: Path, *, note: str) -> None:
    """Draw a figure as a PNG."""
    figure, (axes,) = canvas(4.2, figure_of.title, note)
    for curve in figure_of.curves:
        x, y = zip(*curve.points, strict=True)
        axes.step(x, y, curve.dashes[0], where="post", color=curve.color, linewidth=1.6, label=shortened(curve.name))
    axes.set_ylim(0, 102)
    axes.set_xlim(left=0)
    axes.set_xlabel(figure_of.axis)
    axes.set_ylabel("share of all requests (%)")
    axes.legend(loc="lower right", edgecolor="none", framealpha=0.8, fontsize=8)
    save(figure, path)


def distributions_chart(figure_of: Distributions) -> Chart:
    traces = [
        {
            "x": [number(x) for x, _ in curve.points],
            "y": [number(y) for _, y in curve.points],
            "mode": "lines",
            "line": {"color": curve.color, "width": 1.8, "shape": "hv", "dash": curve.dashes[1]},
            "name": text(curve.name),
            "hovertemplate": f"%{{y:.1f}} % within %{{x:,.2f}} s<extra>{text(curve.name)}</extra>",
        }
        for curve in figure_of.curves
    ]
    shares = axis("share of all requests (%)", range=[0, 102])
    return chart(view("", traces, xaxis=axis(figure_of.axis, rangemode="tozero"), yaxis=shares, height=400))
