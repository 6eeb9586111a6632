"""Differences between arms: each pair of runs, the interval of the mean and the margin, as a chart and a PNG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report.bars import names_axis, narrow
from bench.report.canvas import BAND_COLOR, COLORS, INTERVAL_COLOR, canvas, save, shortened
from bench.report.template import Chart, Trace, axis, chart, text, view
from bench.results.comparison import Comparison, Pairing
from bench.results.study import StudyResult

_TITLE, _WHAT = "Differences", "first / second − 1 (%)"
_ROW_PIXELS, _FRAME_PIXELS, _ROW_INCHES, _FRAME_INCHES = 34, 74, 0.36, 1.4
_NARROW_ROW_PIXELS = 54


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmDifference:
    """The difference of two arms in one measurement, in percent of the second."""

    name: str
    percent: float
    low: float
    high: float
    pairs: tuple[float, ...]
    """The difference in each block; empty if runs are not paired."""
    margin: tuple[float, float]
    verdict: str


def arm_differences(result: StudyResult) -> tuple[ArmDifference, ...]:
    """Return the comparisons that have an interval."""
    titles = {column.measurement: column.title for column in result.columns}
    return tuple(
        difference
        for one in result.differences
        if one.comparison
        and (difference := _arm_difference(one.comparison, titles.get(one.measurement, one.measurement)))
    )


def _arm_difference(one: Comparison, title: str) -> ArmDifference | None:
    if one.ratio is None or one.low is None or one.high is None:
        return None
    pairs = () if one.pairing is Pairing.none else zip(one.first, one.second, strict=True)
    return ArmDifference(
        name=f"{one.names[0]} / {one.names[1]}, {title}",
        percent=_percent(one.ratio),
        low=_percent(one.low),
        high=_percent(one.high),
        pairs=tuple(_percent(first / second) for first, second in pairs),
        margin=(_percent(1 / (1 + one.margin)), _percent(1 + one.margin)),
        verdict=one.text,
    )


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def pairs_chart(differences: Sequence[ArmDifference]) -> Chart:
    texts, count = [text(one.name, limit=54) for one in differences], len(differences)
    names = names_axis(texts, range(count), bottom=count - 0.5, top=-0.5)
    low, high = differences[0].margin
    band = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": low, "x1": high, "layer": "below"}
    shapes = [band | {"fillcolor": BAND_COLOR, "line": {"width": 0}}]
    height = _FRAME_PIXELS + _ROW_PIXELS * count
    scale = axis(_WHAT, zeroline=True, zerolinecolor=INTERVAL_COLOR)
    on_narrow = narrow(names, _FRAME_PIXELS + _NARROW_ROW_PIXELS * count, lines=3)
    shown = {"height": height, "xaxis": scale, "yaxis": names, "shapes": shapes}
    return chart(view("", _traces(differences), narrow=on_narrow, **shown))


def _traces(differences: Sequence[ArmDifference]) -> list[Trace]:
    dots = [(percent, row) for row, one in enumerate(differences) for percent in one.pairs]
    return [
        {
            "mode": "markers",
            "x": [percent for percent, _ in dots],
            "y": [row for _, row in dots],
            "marker": {"size": 7, "color": "#fff", "line": {"color": COLORS[0], "width": 1.4}},
            "hovertemplate": "one pair: %{x:+.2f} %<extra></extra>",
            "showlegend": False,
        },
        {
            "mode": "markers",
            "x": [one.percent for one in differences],
            "y": list(range(len(differences))),
            "marker": {"size": 9, "color": COLORS[0], "symbol": "diamond"},
            "error_x": {
                "array": [one.high - one.percent for one in differences],
                "arrayminus": [one.percent - one.low for one in differences],
                "color": INTERVAL_COLOR,
                "thickness": 1.6,
                "width": 6,
            },
            "customdata": [f"<b>{text(one.verdict)}</b><br>{one.low:+.2f} to {one.high:+.2f} %" for one in differences],
            "hovertemplate": "%{customdata}<extra></extra>",
            "showlegend": False,
        },
    ]


def draw_pairs(differences: Sequence[ArmDifference], path: Path, *, note: str) -> None:
    figure, (axes,) = canvas(_FRAME_INCHES + _ROW_INCHES * len(differences), _TITLE, note)
    axes.axvspan(*differences[0].margin, color="#e4e8ec", zorder=0)
    axes.axvline(0, color=INTERVAL_COLOR, linewidth=0.9)
    for row, one in enumerate(differences):
        axes.plot(one.pairs, [row] * len(one.pairs), "o", color="w", markeredgecolor=COLORS[0], markersize=5)
        whisker = [[one.percent - one.low], [one.high - one.percent]]
        axes.errorbar(
            [one.percent], [row], xerr=whisker, fmt="D", color=COLORS[0], ecolor=INTERVAL_COLOR, capsize=4, markersize=5
        )
    axes.set_yticks(
        range(len(differences)), [shortened(one.name) for one in differences], fontsize=8.5, parse_math=False
    )
    axes.set_ylim(len(differences) - 0.5, -0.5)
    axes.set_xlabel(_WHAT)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    save(figure, path)
