"""Draw figures of results with matplotlib: one function for each figure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.contract.modules import TITLES, ModuleTimes, Part, Phase
from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.result import Evaluation, Result
from bench.mlperf.titles import title
from bench.report import labels
from bench.report.canvas import (
    CURVE_INTERVAL_COLOR,
    EVAL_COLOR,
    FAINT_INK,
    INK,
    MAX_HEADING,
    QUIET_COLOR,
    TARGET_COLOR,
    TRAIN_COLOR,
    canvas,
    empty,
    footer,
    save,
    shortened,
)
from bench.report.tables import minutes_text
from bench.results.modules import phases

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from bench.mlperf.published import Convergence


_MAX_METRICS = 3
QUALITY = {
    **dict.fromkeys(("llama2_70b_lora", "llama31_8b", "llama31_405b", "gpt3"), "evaluation loss (nats per token)"),
    "bert": "masked-LM accuracy",
    "resnet": "top-1 accuracy",
    **dict.fromkeys(("ssd", "retinanet"), "mAP"),
    "unet3d": "mean DICE score",
    **dict.fromkeys(("dlrm", "dlrm_dcnv2"), "AUC"),
    "rnnt": "word error rate",
}
"""What eval_accuracy measures, by benchmark; other benchmarks get the name in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a figure: a system and its minutes, or another number."""

    name: str
    value: float
    interval: tuple[float, float] | None = None
    ours: bool = False
    remark: str = ""
    """Text after the number."""


def loss_figure(result: Result, path: Path) -> None:
    """Draw one trial's evaluations and training loss as a PNG."""
    note = f"{footer(result.platform, 1)}. {_outcome(result)}."
    convergence_figure((result,), path, heading=title(result), note=note)


def convergence_figure(
    results: Sequence[Result],
    path: Path,
    *,
    heading: str,
    note: str,
    band: Sequence[tuple[float, float, float]] = (),
) -> None:
    """Draw the evaluations of all trials, one panel per metric, and a panel with their training losses.

    `band` is (samples, low, high): the range of published runs of this benchmark and batch size.
    """
    metrics = sorted({e.metric for r in results for e in r.evaluations}, key=str)[:_MAX_METRICS] or [None]
    losses = any(r.train_losses for r in results)
    figure, panels = canvas(4.8, heading, note, panels=len(metrics) + losses)
    for axes, metric in zip(panels, metrics, strict=False):
        _draw_evaluations(axes, results, metric)
        _draw_target(axes, results[0], metric)
        if band and metric is None:
            _draw_band(axes, band)
        name = shortened(metric or "evaluation", limit=MAX_HEADING // len(metrics))
        axes.set_title(name, loc="left", fontsize=9.5, color=INK, parse_math=False)
    if losses:
        _draw_training(panels[-1], results)
    save(figure, path)


def step_time_figure(results: Sequence[Result], path: Path, *, heading: str, note: str, names: Sequence[str]) -> None:
    """Draw each trial's step time (median, p10 to p90) and the step times over the run, with the same y-axis."""
    figure, (left, right) = canvas(4.2, heading, note, panels=2)
    for place, result in enumerate(results):
        if (spread := result.step_time_ms) is not None:
            left.plot([place, place], [spread.p10, spread.p90], color=TRAIN_COLOR, linewidth=5, solid_capstyle="butt")
            left.plot([place], [spread.median], "o", color=EVAL_COLOR, markersize=5.5)
    every = max(1, math.ceil(len(results) / _MAX_TICKS))
    shown = range(0, len(results), every)
    left.set_xticks(shown, [shortened(names[n], limit=8) for n in shown], fontsize=8, parse_math=False)
    left.set_xlim(-0.6, len(results) - 0.4)
    left.grid(axis="x", visible=False)
    left.set_title("by trial: median, p10 to p90", loc="left", fontsize=9.5, color=INK)
    left.set_xlabel("trial")
    left.set_ylabel("step time (ms)")
    _draw_step_times(right, results)
    _share_step_times(left, right, results)
    right.xaxis.set_major_formatter("{x:,.10g}")
    save(figure, path)


_MAX_TICKS = 12
_WIDE_RANGE = 3.0
"""Ratio of the longest to the shortest step above which the axis is logarithmic."""


def _share_step_times(left: "Axes", right: "Axes", results: Sequence[Result]) -> None:
    """Give both panels the same y-axis, which covers the step times of both."""
    times = [time_ms for r in results for _, time_ms in r.step_times_ms]
    times += [time_ms for r in results if (s := r.step_time_ms) for time_ms in (s.p10, s.median, s.p90)]
    times = [time_ms for time_ms in times if 0 < time_ms < math.inf]
    if not times:
        return
    low, high = min(times), max(times)
    for axes in (left, right):
        if high > _WIDE_RANGE * low:
            axes.set_yscale("log")
            axes.set_ylim(low / 1.1, high * 1.1)
            axes.set_yticks(labels.log_ticks(low / 1.1, high * 1.1))
            axes.set_yticks([], minor=True)
        else:
            margin = 0.06 * (high - low) or 0.05 * high
            axes.set_ylim(low - margin, high + margin)
        axes.yaxis.set_major_formatter("{x:,.10g}")


def samples_figure(ours: Mapping[int, int], known: "Convergence", path: Path, *, heading: str, note: str) -> None:
    """Draw the distribution of samples to target, of our trials and of published runs."""
    figure, (axes,) = canvas(3.4, heading, note)
    num_ours = sum(ours.values())
    our_shares = {samples: count / num_ours for samples, count in ours.items()}
    ticks = sorted({*our_shares, *dict(known.shares)})
    for shares, offset, color, name in (
        (our_shares, -0.2, EVAL_COLOR, f"this set, n = {num_ours}"),
        (dict(known.shares), 0.2, QUIET_COLOR, f"published {known.kind}, n = {known.num_runs:,}"),
    ):
        heights = [100 * shares.get(tick, 0) for tick in ticks]
        bars = axes.bar([place + offset for place in range(len(ticks))], heights, 0.38, color=color, label=name)
        axes.bar_label(bars, [_percent(height) for height in heights], fontsize=8, padding=2, color=INK)
    axes.set_xticks(range(len(ticks)), [f"{tick:,.0f}" for tick in ticks])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("samples to target")
    axes.set_ylabel("share of runs (%)")
    axes.margins(y=0.12)
    axes.legend(loc="best", frameon=False, fontsize=9)  # by default, matplotlib warns on a busy machine
    save(figure, path)


def bars_figure(bars: Sequence[Bar], path: Path, *, heading: str, note: str, what: str = "minutes to target") -> None:
    """Draw numbers as horizontal bars in the given order; our bars are dark, intervals are whiskers."""
    figure, (axes,) = canvas(1.7 + 0.26 * len(bars), heading, note)
    rows = range(len(bars))
    longest = max(max(bar.value, *(bar.interval or (0, 0))) for bar in bars)
    axes.barh(rows, [bar.value for bar in bars], 0.68, color=[EVAL_COLOR if bar.ours else QUIET_COLOR for bar in bars])
    for row, bar in enumerate(bars):
        end = bar.value
        if bar.interval:
            end = max(end, bar.interval[1])
            if bar.interval[1] - bar.interval[0] > LEAST_WHISKER * longest:
                axes.plot(bar.interval, [row, row], color=CURVE_INTERVAL_COLOR, linewidth=2, marker="|", markersize=10)
        axes.annotate(
            _bar_text(bar),
            (end, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=INK,
            fontweight="bold" if bar.ours else "normal",
        )
    axes.set_yticks(rows, [shortened(bar.name) for bar in bars], fontsize=8.5, parse_math=False)
    for label, bar in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if bar.ours else "normal")
    axes.set_ylim(len(bars) - 0.4, -0.6)
    room = 1.6 if any(bar.remark or bar.interval for bar in bars) else 1.08
    axes.set_xlim(0, longest * room or 1)
    axes.set_xlabel(what)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    save(figure, path)


def _bar_text(bar: Bar) -> str:
    """Return the text after a bar: its number, its interval and its remark."""
    between = "" if bar.interval is None else f"(90 %: {' to '.join(minutes_text(end) for end in bar.interval)})"
    return " ".join(filter(None, (minutes_text(bar.value), between, bar.remark)))


LEAST_WHISKER = 0.02
"""Share of the longest bar; shorter whiskers are not drawn, since the interval is also in the text."""


def _percent(share: float) -> str:
    return f"{share:.0f} %" if share >= 1 else "< 1 %" if share else ""


def _draw_evaluations(axes: "Axes", results: Sequence[Result], metric: str | None) -> None:
    """Draw evaluations over samples, or over minutes if any evaluation has no sample count."""
    chosen = [[e for e in r.evaluations if e.metric == metric] for r in results]
    by_samples = all(e.samples is not None for evaluations in chosen for e in evaluations)
    has_points = False
    for result, evaluations in zip(results, chosen, strict=True):
        points = [
            (x, e.value) for e in evaluations if (x := e.samples if by_samples else _minute(result, e)) is not None
        ]
        if not points:
            continue
        has_points = True
        color, style = (EVAL_COLOR, "-") if result.valid else (TARGET_COLOR, ":")
        axes.plot(*zip(*points, strict=True), style, color=color, linewidth=1.1, alpha=0.65, marker="o", markersize=2.5)
        axes.plot(*points[-1], "o", color=color, markersize=6)
    if not has_points:
        empty(axes, "no evaluation in these logs")
    axes.set_xlabel("samples trained on" if by_samples else "minutes since run_start")
    what = metric or QUALITY.get(results[0].benchmark or "", "eval_accuracy, as logged")
    axes.set_ylabel(shortened(what), parse_math=False)
    axes.xaxis.set_major_formatter("{x:,.10g}")


def _minute(result: Result, evaluation: Evaluation) -> float | None:
    return None if result.run_start_ms is None else (evaluation.time_ms - result.run_start_ms) / 60_000


def _draw_target(axes: "Axes", result: Result, metric: str | None) -> None:
    """Draw the target line, with its label on the side opposite to the curve."""
    official = BENCHMARKS.get(result.benchmark or "")
    goals = official.goals if official and metric else ()
    target = next((goal.value for goal in goals if goal.metric == metric), None) if metric else result.target
    if target is None:
        return
    axes.axhline(target, color=TARGET_COLOR, linestyle="--", linewidth=1.1)
    side, offset = ("bottom", 3) if result.higher_is_better else ("top", -3)
    axes.annotate(
        f"target {target:g}",
        (0, target),
        (5, offset),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        va=side,
        fontsize=8.5,
        color=TARGET_COLOR,
    )


def _draw_band(axes: "Axes", band: Sequence[tuple[float, float, float]]) -> None:
    samples, low, high = zip(*band, strict=True)
    axes.fill_between(samples, low, high, color=QUIET_COLOR, alpha=0.5, linewidth=0, zorder=0)
    axes.annotate(
        "published runs", (samples[0], high[0]), (4, 3), textcoords="offset points", fontsize=8.5, color=FAINT_INK
    )


def _draw_training(axes: "Axes", results: Sequence[Result]) -> None:
    for result in results:
        points = [(samples, loss) for samples, loss in result.train_losses if samples is not None]
        if points:
            color = EVAL_COLOR if result.valid else TARGET_COLOR
            axes.plot(*zip(*points, strict=True), color=color, linewidth=0.8, alpha=0.35)
    if not axes.lines:
        empty(axes, "training losses without sample counts")
    axes.set_title("training", loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel("samples trained on")
    axes.set_ylabel("training loss")
    axes.xaxis.set_major_formatter("{x:,.10g}")


def _draw_step_times(axes: "Axes", results: Sequence[Result]) -> None:
    """Draw every step time over samples."""
    if not any(r.step_times_ms for r in results):
        empty(axes, "no step times along the run")
        return
    for result in results:
        if result.step_times_ms:
            axes.plot(*zip(*result.step_times_ms, strict=True), color=EVAL_COLOR, linewidth=0.9, alpha=0.55)
    axes.set_title("over the run, all trials", loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel("samples trained on")


def _outcome(result: Result) -> str:
    time = f"{result.minutes:.2f} min from run_start to run_stop" if result.minutes is not None else "no time"
    if not result.valid:
        time = f"invalid trial: {time}"
    if result.target is None:
        return f"{time}, no target"
    if not result.converged:
        return f"{time}, target not reached"
    at = f" at {result.samples_to_target:,} samples" if result.samples_to_target is not None else ""
    return f"{time}, target reached{at}"


COLORS = {
    Part.qkv: "#1f5a8c",
    Part.output: "#5b8db8",
    Part.attention: "#e08a00",
    Part.scores: "#e08a00",
    Part.softmax: "#ffb84d",
    Part.values: "#b36e00",
    Part.rope: "#f2c879",
    Part.fc1: "#0b6e4f",
    Part.activation: "#8fc9ae",
    Part.fc2: "#3fa07c",
    Part.adapters: "#7b4ea3",
    Part.norm: "#b79fd1",
    Part.head: "#8c564b",
    Part.loss: "#c9a79d",
    Part.weights: "#6f7d3c",
    Part.adamw: "#274060",
    Part.communication: "#c0392b",
    Part.copies: "#e79a90",
    Part.gap: "#e4e4e4",
}
OTHER, OTHER_COLOR = "all other parts", "#9aa3ab"
_LEAST_SHARE, _LEAST_TO_LABEL = 0.01, 0.06
"""Shares of the longest bar: smaller parts are merged into `OTHER`; smaller parts have no number in the bar."""
_BAR_INCHES, _MARGIN_INCHES = 0.42, 1.9


def module_figure(profiles: Sequence[tuple[str, ModuleTimes]], path: Path, *, heading: str, note: str) -> None:
    """Draw profiles as a PNG: a bar for each phase, in milliseconds per step."""
    bars = [
        (f"{name} {phase}" if len(profiles) > 1 else str(phase), segments(times, phase))
        for name, times in profiles
        for phase in phases(times)
    ]
    figure, (axes,) = canvas(_MARGIN_INCHES + _BAR_INCHES * len(bars), heading, note)
    longest = max(sum(parts.values()) for _, parts in bars)
    for place, (_, parts) in enumerate(bars):
        _draw_bar(axes, place, parts, longest)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("ms per step")
    axes.set_xlim(left=0)
    handles, labels = axes.get_legend_handles_labels()
    handle_of = dict(zip(labels, handles, strict=True))
    names = [name for name in (*(TITLES[part] for part in COLORS), OTHER) if name in handle_of]
    figure.legend([handle_of[name] for name in names], names, loc="outside right upper", fontsize=7, frameon=False)
    save(figure, path)


def segments(times: ModuleTimes, phase: Phase) -> dict[str, float]:
    """Return the milliseconds of a phase by legend entry; very small parts are merged into `OTHER`."""
    of_phase: dict[Part, float] = {row.part: row.time_ms for row in times.rows if row.phase is phase}
    shown = {part: ms for part, ms in of_phase.items() if part in COLORS and ms >= _LEAST_SHARE * times.step_ms}
    other_ms = sum(of_phase.values()) - sum(shown.values())
    return {TITLES[part]: ms for part, ms in shown.items()} | ({OTHER: other_ms} if other_ms > 0 else {})


def _draw_bar(axes: "Axes", place: int, parts: dict[str, float], longest: float) -> None:
    colors, left = {TITLES[part]: color for part, color in COLORS.items()} | {OTHER: OTHER_COLOR}, 0.0
    for part, ms in parts.items():
        axes.barh(place, ms, left=left, color=colors[part], label=part, edgecolor="white", linewidth=0.4)
        if ms >= _LEAST_TO_LABEL * longest:
            color, middle = _ink(colors[part]), left + ms / 2
            axes.text(middle, place, f"{ms:,.1f}", ha="center", va="center", fontsize=7, color=color)
        left += ms


def _ink(color: str) -> str:
    """Return a readable text colour for a bar."""
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "#ffffff"
