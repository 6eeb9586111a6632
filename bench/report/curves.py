"""Interactive curves of a page: evaluations, losses and step times of one set, or of several on the same axes."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from bench.mlperf.benchmarks import BENCHMARKS
from bench.mlperf.result import Evaluation, Result
from bench.report import labels
from bench.report.canvas import BAND_COLOR, COLORS, INVALID_COLOR
from bench.report.template import Chart, Trace, axis, chart, text, view

_MOST_POINTS = 1500
"""Points per curve. A longer curve shows the minimum and the maximum of each interval."""
_MOST_AT_ONCE = 6
"""Up to this number of curves, the pointer shows the values of all; else only of the nearest."""
_MOST_METRICS, _WIDE_RANGE = 3, 3.0
_WIDER, _MOST_WIDER = 1.8, 4
"""Pixels that a curve is wider than the next one, and up to how many curves."""

Points = list[tuple[float, float]]


class Runs(Protocol):
    """The trials of a set, or the runs of an arm."""

    @property
    def name(self) -> str: ...

    @property
    def trial_names(self) -> Sequence[str]: ...

    @property
    def results(self) -> Sequence[Result]: ...


class Trial(NamedTuple):
    """One trial and its style."""

    of_set: str
    """The label of its set."""
    name: str
    result: Result
    color: str
    more_width: float
    is_first: bool
    """Whether it is the first of its set; with several sets, the legend shows the first trial of each."""
    is_alone: bool
    """Whether its set is the only one, so that the legend lists trials."""


TITLES = {
    "evaluations": "Evaluations",
    "training_losses": "Training loss",
    "step_times": "Step time along the run",
    "step_time_distributions": "Distribution of step times",
}
"""The titles of the charts of `overlaid`."""


def overlaid(sets: Sequence[Runs]) -> dict[str, Chart]:
    """Return the curves of all sets on the same axes, without empty charts."""
    charts = {
        "evaluations": evaluation_chart(sets),
        "training_losses": training_chart(sets),
        "step_times": step_time_chart(sets),
        "step_time_distributions": step_time_distribution(sets),
    }
    return {name: chart for name, chart in charts.items() if chart["views"]}


def evaluation_chart(sets: Sequence[Runs], *, band: Sequence[tuple[float, float, float]] = ()) -> Chart:
    """Return the evaluations of all trials, by samples and by minutes; a view for each metric.

    `band` is (samples, low, high): the range of published runs of this benchmark and batch size.
    """
    metrics = {e.metric for trials in sets for r in trials.results for e in r.evaluations}
    chosen = sorted(metrics, key=str)[:_MOST_METRICS]
    views = [view for metric in chosen for view in _evaluations(sets, metric)]
    if views and None in metrics:
        views[0]["traces"][:0] = _band(band)
    return chart(*views)


def _band(band: Sequence[tuple[float, float, float]]) -> list[Trace]:
    """Return the lower and the upper edge of a shaded area."""
    samples = [samples for samples, _, _ in band]
    edge = {"x": samples, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    upper = {"fill": "tonexty", "fillcolor": BAND_COLOR, "name": "published runs", "showlegend": True}
    return (
        [edge | {"y": [low for _, low, _ in band]}, edge | {"y": [high for *_, high in band]} | upper] if band else []
    )


def _evaluations(sets: Sequence[Runs], metric: str | None) -> Iterator[Chart]:
    def evaluations(result: Result) -> list[Evaluation]:
        return [e for e in result.evaluations if e.metric == metric]

    def by_samples(result: Result) -> Points:
        return [(e.samples, e.value) for e in evaluations(result) if e.samples is not None]

    def by_minutes(result: Result) -> Points:
        start_ms = result.run_start_ms
        return [((e.time_ms - start_ms) / 60_000, e.value) for e in evaluations(result)] if start_ms is not None else []

    name = "" if metric is None else f"{metric}, "
    target = _target_line(sets, metric)
    shown = {"yaxis": axis(metric or "evaluation"), **target}
    for title, points, label, unit in (
        ("by samples", by_samples, "samples trained on", "%{x:,} samples"),
        ("by minutes", by_minutes, "minutes since run_start", "%{x:.2f} min"),
    ):
        traces = _curves(sets, points, hover=f"%{{y:.5g}} at {unit}", mode="lines+markers")
        places = {place for trace in traces for place in trace["x"]}
        one = {"tickvals": [*places]} if len(places) == 1 else {}  # else plotly writes parts of a sample around it
        yield view(f"{text(name)}{title}", traces, xaxis=axis(label, **one), **shown, **_pointer(traces))


def training_chart(sets: Sequence[Runs]) -> Chart:
    """Return the training losses of all trials."""

    def points(result: Result) -> Points:
        return [(samples, loss) for samples, loss in result.train_losses if samples is not None]

    traces = _curves(sets, points, hover="%{y:.5g} at %{x:,} samples")
    shown = {"xaxis": axis("samples trained on"), "yaxis": axis("training loss")}
    return chart(view("", traces, **shown, **_pointer(traces)))


def step_time_chart(sets: Sequence[Runs]) -> Chart:
    """Return the step times of all trials along the run."""

    def points(result: Result) -> Points:
        return list(result.step_times_ms)

    traces = _curves(sets, points, hover="%{y:,.1f} ms at %{x:,} samples")
    shown = {"xaxis": axis("samples trained on"), "yaxis": axis("step time (ms)", **_wide([t["y"] for t in traces]))}
    return chart(view("", traces, **shown, **_pointer(traces)))


def step_time_distribution(sets: Sequence[Runs]) -> Chart:
    """Return the cumulative distribution of each trial's step times."""

    def points(result: Result) -> Points:
        return distribution([time_ms for _, time_ms in result.step_times_ms])

    traces = _curves(sets, points, hover="%{y:.1f} % within %{x:,.1f} ms", shape="hv")
    times = axis("step time (ms)", **_wide([trace["x"] for trace in traces]))
    return chart(view("", traces, xaxis=times, yaxis=axis("steps within this time (%)", range=[0, 102])))


def _wide(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return a logarithmic axis if the longest time is many times the shortest."""
    times = [time for of_one in values for time in of_one]
    is_wide = bool(times) and 0 < _WIDE_RANGE * min(times) < max(times)
    return labels.log_axis(min(times), max(times)) if is_wide else {}


def _pointer(traces: Sequence[Trace]) -> dict[str, Any]:
    return {"hovermode": "x unified"} if 1 < len(traces) <= _MOST_AT_ONCE else {}


def distribution(values: Sequence[float]) -> Points:
    """Return (value, percentage of the values that are at most as large) in ascending order."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return []
    every = math.ceil(len(ordered) / _MOST_POINTS)
    places = sorted({*range(0, len(ordered), every), len(ordered) - 1})
    return [(ordered[0], 0.0), *((ordered[n], 100 * (n + 1) / len(ordered)) for n in places)]


def _curves(
    sets: Sequence[Runs],
    points: Callable[[Result], Points],
    *,
    hover: str,
    mode: str = "lines",
    shape: str = "linear",
) -> list[Trace]:
    """Return one trace for each trial that has points."""
    trials = list(_trials(sets))
    curves = [(trial, thinned(points(trial.result))) for trial in trials]
    return [
        {
            "x": [number(x) for x, _ in curve],
            "y": [number(y) for _, y in curve],
            "mode": mode,
            "line": {"color": _color(trial), "width": 1.6 + trial.more_width, "dash": _dash(trial), "shape": shape},
            "marker": {"color": _color(trial), "size": 6 + 2 * trial.more_width},
            "opacity": 0.9 if len(curves) <= _MOST_AT_ONCE else 0.7,
            "hovertemplate": f"{hover}<extra>{_name(trial)}</extra>",
            **_legend(trial),
        }
        for trial, curve in curves
        if curve
    ]


def _trials(sets: Sequence[Runs]) -> Iterator[Trial]:
    """Yield all trials; each set has its colour, and if there is only one set, each trial.

    Of a few curves the first ones are wider, so that a curve below an equal one is still seen.
    """
    is_alone = len(sets) == 1
    short = labels.short([trials.name for trials in sets])
    num_colors = len(sets[0].results) if is_alone else len(sets)
    for number_of_set, trials in enumerate(sets):
        for place, (name, result) in enumerate(zip(trials.trial_names, trials.results, strict=True)):
            number = place if is_alone else number_of_set
            more = _WIDER * (num_colors - 1 - number) if num_colors <= _MOST_WIDER else 0.0
            color = COLORS[number % len(COLORS)]
            yield Trial(short[number_of_set], name, result, color, more, is_first=place == 0, is_alone=is_alone)


def _legend(trial: Trial) -> dict[str, Any]:
    if trial.is_alone:
        return {"name": _name(trial)}
    return {
        "name": text(trial.of_set),
        "legendgroup": text(trial.of_set),
        "showlegend": trial.is_first,
    }


def _name(trial: Trial) -> str:
    name = f"trial {text(trial.name)}" if trial.is_alone else f"{text(trial.of_set)}, trial {text(trial.name)}"
    return name if trial.result.valid else f"{name} (invalid)"


def _color(trial: Trial) -> str:
    return INVALID_COLOR if trial.is_alone and not trial.result.valid else trial.color


def _dash(trial: Trial) -> str:
    return "solid" if trial.result.valid else "dot"


def thinned(points: Points) -> Points:
    """Return at most _MOST_POINTS finite points, with the minimum and the maximum of each interval."""
    points = [point for point in points if all(map(math.isfinite, point))]
    if len(points) <= _MOST_POINTS:
        return points
    length = math.ceil(2 * len(points) / _MOST_POINTS)
    kept: Points = []
    for start in range(0, len(points), length):
        stretch = range(start, min(start + length, len(points)))
        ends = (min(stretch, key=lambda n: points[n][1]), max(stretch, key=lambda n: points[n][1]))
        kept += [points[n] for n in sorted({*ends})]
    return kept


def number(value: float) -> float:
    """Return a number with six digits, which is exact enough for a chart."""
    return float(f"{value:.6g}")


def _target_line(sets: Sequence[Runs], metric: str | None) -> dict[str, Any]:
    """Return the line of the target if all sets have the same one, else nothing."""
    targets = {_target(result, metric) for trials in sets for result in trials.results}
    if len(targets) != 1 or None in targets:
        return {}
    (target,) = targets
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target}
    label = {"text": f"target {target:g}", "textposition": "start", "font": {"color": INVALID_COLOR, "size": 11}}
    return {"shapes": [line | {"line": {"color": INVALID_COLOR, "width": 1.2, "dash": "dash"}, "label": label}]}


def _target(result: Result, metric: str | None) -> float | None:
    if metric is None:
        return result.target
    known = BENCHMARKS.get(result.benchmark or "")
    return next((goal.value for goal in known.goals if goal.metric == metric), None) if known else None
