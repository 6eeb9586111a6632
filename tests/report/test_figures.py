"""Figures are readable PNGs for any results, and the same results give the same bytes."""

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.mlperf.published import samples_to_target
from bench.mlperf.result import UNVERIFIED, parse
from bench.mlperf.speed import Spread
from bench.report import figures
from bench.report.bars import bar_chart
from bench.report.canvas import EVAL_COLOR, QUIET_COLOR, TARGET_COLOR, footer
from bench.report.figures import (
    Bar,
    bars_figure,
    convergence_figure,
    loss_figure,
    samples_figure,
    step_time_figure,
)
from bench.report.tables import minutes_text, number_text
from helpers.types import MakeLog

HOSTILE = "$\\frac{ \x1b[2J \n<b> \u6f22"
"""A name with markup for mathematics, a terminal escape, and a character that the font may lack."""


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


@pytest.mark.long
@pytest.mark.parametrize("evals", [(), (0.95,), (0.95, 0.93, 0.92)])
def test_convergence_figure_with_and_without_evaluations(
    written_log: MakeLog, tmp_path: Path, evals: tuple[float, ...]
) -> None:
    result = parse(written_log(evals=evals))
    band = [(1536.0, 0.93, 0.95), (1920.0, 0.92, 0.94)]
    pictures = [tmp_path / "one.png", tmp_path / "two.png"]
    for picture in pictures:
        convergence_figure([result, result], picture, heading=HOSTILE, note=footer(HOSTILE, 2), band=band)
    assert png_size(pictures[0]) == (1200, 720)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


@pytest.mark.long
def test_every_metric_has_a_panel_up_to_a_maximum(written_log: MakeLog, tmp_path: Path) -> None:
    path = written_log(submission_benchmark="stable_diffusion", evals=(0.95,) * 40)
    lines = path.read_text().splitlines(keepends=True)
    metrics = (f'"metric": "$\\\\frac{{{n}", "samples_count"' for n in range(len(lines)))
    path.write_text("".join(x.replace('"samples_count"', next(metrics)) if "eval_accuracy" in x else x for x in lines))
    result = parse(path)
    assert len({e.metric for e in result.evaluations}) == 40
    convergence_figure([result], tmp_path / "many.png", heading="metrics", note="")
    assert png_size(tmp_path / "many.png") == (1200, 720)


@pytest.fixture
def saved_figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures instead of saving them."""
    collected: list[Figure] = []
    monkeypatch.setattr(figures, "save", lambda figure, path: collected.append(figure))
    return collected


@pytest.mark.parametrize(("slow", "scale"), [(7000.0, "log"), (3500.0, "linear")])
def test_step_time_panels_share_one_axis(
    written_log: MakeLog, saved_figures: list[Figure], slow: float, scale: str
) -> None:
    """A quarter of the steps takes much longer than the others: all data must be inside the axes."""
    times = tuple((8.0 * n, slow if n % 4 == 0 else 2000.0) for n in range(1, 41))
    spread = Spread(median=2000.0, p10=2000.0, p90=slow, mean=2000.0, count=40)
    result = dataclasses.replace(parse(written_log()), step_times_ms=times, step_time_ms=spread)
    step_time_figure([result] * 2, Path("x.png"), heading="", note="", names=["0", HOSTILE])
    left, right = saved_figures[0].axes
    assert [tuple(map(tuple, line.get_xydata())) for line in right.lines] == [times, times]
    assert left.get_ylim() == right.get_ylim()
    assert left.get_yscale() == right.get_yscale() == scale
    low, high = right.get_ylim()
    assert low < 2000.0 and high > slow


@pytest.mark.long
def test_step_time_figure_of_many_trials_has_readable_names(written_log: MakeLog, tmp_path: Path) -> None:
    result = parse(written_log(evals=tuple(0.95 - n / 1000 for n in range(20))))
    names = [f"{n}{HOSTILE}" for n in range(40)]
    step_time_figure([result] * 40, tmp_path / "40.png", heading="step time", note="", names=names)
    assert png_size(tmp_path / "40.png") == (1200, 630)


def test_interval_is_text_and_a_whisker_if_wide_enough(saved_figures: list[Figure]) -> None:
    for interval in ((29.08, 29.14), (27.0, 31.0)):
        bars_figure([Bar(name="ours", value=29.1, interval=interval, ours=True)], Path("x.png"), heading="", note="")
    narrow, wide = (figure.axes[0] for figure in saved_figures)
    assert [axes.texts[0].get_text() for axes in (narrow, wide)] == [
        "29.10 (90 %: 29.08 to 29.14)",
        "29.10 (90 %: 27.00 to 31.00)",
    ]
    assert [len(narrow.lines), len(wide.lines)] == [0, 1]
    assert list(wide.lines[0].get_xdata()) == [27.0, 31.0]


def test_interactive_and_static_bars_are_equal() -> None:
    """Our bars and published ones differ in style; narrow intervals have no whisker."""
    bars = [
        Bar(name="<b>", value=30.0, interval=(29.9, 30.1), ours=True),
        Bar(name="theirs", value=20.0),
        Bar(name="wide", value=29.0, interval=(27.0, 32.0), ours=True, remark="(n = 3, no score)"),
    ]
    (shown,) = bar_chart(bars, what="minutes")["views"]
    saved_figures, whiskers = shown["traces"]
    numbers = shown["layout"]["annotations"]
    assert (saved_figures["x"], saved_figures["marker"]["pattern"]["shape"]) == ([30.0, 20.0, 29.0], ["", "/", ""])
    assert (whiskers["y"], whiskers["error_x"]["array"], whiskers["error_x"]["arrayminus"]) == ([2], [3.0], [2.0])
    assert [one["text"] for one in numbers] == ["<b>30.00</b>", "20.00", "<b>29.00</b>"]
    assert {(one["xref"], one["x"]) for one in numbers} == {("paper", 1)}, "a column: none is at the end of a whisker"
    assert saved_figures["customdata"] == [
        "&lt;b&gt;<br><b>30.00</b>, 90 % interval 29.90 to 30.10",
        "theirs<br><b>20.00</b>, published",
        "wide<br><b>29.00</b>, 90 % interval 27.00 to 32.00 (n = 3, no score)",
    ]


@pytest.mark.long
def test_bars_and_shares(tmp_path: Path) -> None:
    bars = [Bar(name=HOSTILE * 20, value=0.0), Bar(name="ours", value=3.0, interval=(2.9, 3.4), ours=True)]
    bars_figure(bars, tmp_path / "bars.png", heading="minutes", note=footer("8 × H200", 10))
    bars_figure(bars[:1], tmp_path / "zero.png", heading="minutes", note="")
    known = samples_to_target("llama2_70b_lora", 8)
    assert known is not None
    samples_figure({3072: 9, 9999: 1}, known, tmp_path / "shares.png", heading="samples", note="")
    assert [png_size(tmp_path / f"{name}.png")[0] for name in ("bars", "zero", "shares")] == [1200] * 3


def color(artist: Any) -> str:
    got = artist.get_facecolor() if hasattr(artist, "get_facecolor") else artist.get_color()
    return to_hex(got)


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_bar_starts_at_zero_and_has_the_length_of_its_number(saved_figures: list[Figure]) -> None:
    bars = [
        Bar(name="theirs", value=2.0),
        Bar(name="ours", value=3.0, interval=(2.5, 3.5), ours=True, remark="(n = 1)"),
    ]
    bars_figure(bars, Path("unused"), heading="minutes", note="", what="min")
    (axes,) = saved_figures[0].axes
    shown = [(bar.get_x(), bar.get_width(), color(bar)) for bar in axes.patches]
    assert shown == [(0, 2.0, QUIET_COLOR), (0, 3.0, EVAL_COLOR)]
    assert [points(line) for line in axes.lines] == [[(2.5, 1.0), (3.5, 1.0)]], "one whisker, on our row"
    assert texts(axes) == ["2.00", "3.00 (90 %: 2.50 to 3.50) (n = 1)"]
    assert [text.xy for text in axes.texts] == [(2.0, 0), (3.5, 1)], "after the bar, or its whisker"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["theirs", "ours"]
    assert axes.get_xlim() == (0, pytest.approx(3.5 * 1.6)) and axes.get_xlabel() == "min"
    low, high = axes.get_ylim()
    assert low > high, "the first bar on top"


def test_a_loss_falls_to_its_target(written_log: MakeLog, saved_figures: list[Figure]) -> None:
    good, bad = parse(written_log(evals=(0.95, 0.93, 0.92))), parse(written_log(name="bad", evals=(0.96, 0.94)))
    band = [(1536.0, 0.93, 0.95), (1920.0, 0.92, 0.94)]
    convergence_figure([good, bad], Path("unused"), heading="x", note="", band=band)
    left, right = saved_figures[0].axes
    curves = [(points(line), color(line), line.get_linestyle()) for line in left.lines]
    ours = [(1536, 0.95), (1920, 0.93), (2304, 0.92)]
    assert curves[:2] == [(ours, EVAL_COLOR, "-"), (ours[-1:], EVAL_COLOR, "None")]
    assert [(style, color) for _, color, style in curves[2:4]] == [(":", TARGET_COLOR), ("None", TARGET_COLOR)], (
        "invalid"
    )
    assert curves[2][0] == [(1536, 0.96), (1920, 0.94)]
    assert curves[4] == ([(0, 0.925), (1, 0.925)], TARGET_COLOR, "--")
    assert texts(left) == ["target 0.925", "published runs"]
    corners = {(float(x), float(y)) for x, y in left.collections[0].get_paths()[0].vertices}
    assert corners == {(1536, 0.93), (1536, 0.95), (1920, 0.92), (1920, 0.94)}
    assert [points(line) for line in right.lines] == [
        [(1536, 1.05), (1920, 1.03), (2304, 1.02)],
        [(1536, 1.06), (1920, 1.04)],
    ]


def test_figure_of_a_trial_without_evaluations_or_target(written_log: MakeLog, saved_figures: list[Figure]) -> None:
    empty = written_log(submission_benchmark=None, target_accuracy=None, evals=())
    convergence_figure([parse(empty)], Path("unused"), heading="x", note="")
    (axes,) = saved_figures[0].axes
    assert (texts(axes), len(axes.lines)) == (["no evaluation in these logs"], 0)


def test_each_trial_has_its_own_position_inside_the_axes(written_log: MakeLog, saved_figures: list[Figure]) -> None:
    trials = [parse(written_log(name=name)) for name in ("a", "b")]
    step_time_figure(trials, Path("unused"), heading="x", note="", names=["a", "b"])
    left = saved_figures[0].axes[0]
    medians = [points(line) for line in left.lines if line.get_marker() == "o"]
    assert medians == [[(place, trial.step_time_ms.median)] for place, trial in enumerate(trials) if trial.step_time_ms]
    assert [label.get_text() for label in left.get_xticklabels()] == ["a", "b"]
    assert left.get_xlim() == (-0.6, 1.6), "as much room on either side"


def test_samples_figure_shows_shares_of_our_and_published_runs(saved_figures: list[Figure]) -> None:
    known = samples_to_target("llama2_70b_lora", 8)
    assert known is not None and 3072 in dict(known.shares)
    samples_figure({3072: 3, 9999: 1}, known, Path("unused"), heading="x", note="")
    (axes,) = saved_figures[0].axes
    ours, theirs = ([bar.get_height() for bar in group] for group in axes.containers)
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert (ours[ticks.index("3,072")], ours[ticks.index("9,999")], sum(ours)) == (75, 25, 100)
    assert theirs[ticks.index("3,072")] == pytest.approx(100 * dict(known.shares)[3072]) and theirs[-1] == 0


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({}, "target reached at 2,304 samples."),
        ({"evals": (0.95,)}, "target not reached."),
        ({"target_accuracy": None, "submission_benchmark": None}, "no target."),
    ],
)
def test_figure_of_one_trial_has_its_outcome(
    written_log: MakeLog, saved_figures: list[Figure], changes: dict[str, Any], outcome: str
) -> None:
    loss_figure(parse(written_log(**changes)), Path("unused"))
    note = " ".join(saved_figures[0]._supxlabel.get_text().split())  # type: ignore[attr-defined]
    assert note.startswith(UNVERIFIED) and note.endswith(outcome)
    assert ("invalid trial" in note) == ("evals" in changes)


def test_numbers_have_significant_digits_only() -> None:
    assert [number_text(x) for x in (0.0, 38.153, 495.83, 3092.6, 196608.0)] == [
        *("0", "38.15", "495.8", "3,093", "196,608")
    ]
    assert [number_text(x) for x in (1.2345, 0.92418, 0.0412, 0.0031274, -0.0031274, 3.1274e-5)] == [
        *("1.23", "0.924", "0.0412", "0.00313", "-0.00313", "0.000031")
    ], "a time between two tokens is a few thousandths of a second"
    assert [minutes_text(x) for x in (0.23456, 29.100687)] == ["0.235", "29.10"]


def test_footer_has_unverified_note_hardware_and_n() -> None:
    assert footer("8 × NVIDIA H200", 10) == f"{UNVERIFIED} 8 × NVIDIA H200, n = 10 runs"
    assert footer(None, 1) == f"{UNVERIFIED} hardware not logged, n = 1 run"


@pytest.mark.long
def test_long_names_leave_room_for_the_figure(written_log: MakeLog, tmp_path: Path) -> None:
    """Warnings are errors: matplotlib warns if there is no room for the axes."""
    result = parse(written_log())
    long = "x" * 100_000
    convergence_figure([result], tmp_path / "long.png", heading=long, note=footer(long, 1))
    assert png_size(tmp_path / "long.png") == (1200, 720)
