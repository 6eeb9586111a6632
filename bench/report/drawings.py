"""Draw the figures of a report page that a set has data for, with their captions."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.mlperf import published
from bench.report import bars, curves, figures, labels, throughput
from bench.report.bars import bar_chart
from bench.report.canvas import COLORS, footer
from bench.report.compare import Claim, Entry
from bench.report.figures import Bar, module_figure
from bench.report.sets import TrialSet
from bench.report.template import Chart, Charts


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A figure of the page: a PNG for print, and interactive charts for the screen."""

    file: str
    caption: str
    uri: str
    charts: Mapping[str, Chart]
    """By their id in the page. Without charts, the PNG is shown on the screen, too."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Titles of charts, by id."""


def draw_training(
    trials: TrialSet, claimed: Claim, entries: Sequence[Entry], out: Path, *, mark: str
) -> Iterator[tuple[str, Shown]]:
    """Draw the figures that the trials have data for; yield each figure with its key."""
    from bench.mlperf import forecast

    s, note = trials.score, footer(trials.hardware, len(trials.results))
    benchmark, gbs = None if trials.why_not_benchmark else s.benchmark, s.global_batch_size
    heading = f"{trials.measured}, {trials.name}"

    path = out / f"convergence{mark}.png"
    band = [(p.samples, p.low, p.high) for p in forecast.band(benchmark, gbs)]
    figures.convergence_figure(trials.results, path, heading=heading, note=note, band=band)
    shade = " Shaded: range of published runs of this benchmark and batch size." if band else ""
    bad = "" if all(r.valid for r in trials.results) else " Red and dotted: invalid trial."
    charts = {
        "evaluation": curves.evaluation_chart([trials], band=band),
        "training_loss": curves.training_chart([trials]),
    }
    caption = f"Every evaluation of every trial.{bad}{shade}"
    yield "convergence", shown(path, caption, charts, mark=mark)

    yield from _draw_step_times(trials, out, mark=mark)
    yield from _draw_modules(trials, out, mark=mark)

    known = published.samples_to_target(benchmark, gbs) if benchmark and gbs else None
    if known and s.samples_distribution:
        path = out / f"samples{mark}.png"
        figures.samples_figure(s.samples_distribution, known, path, heading=heading, note=note)
        source = f"Published: {known.kind}, {known.source}."
        chart = bars.samples_chart(s.samples_distribution, known)
        yield "samples", shown(path, f"Distribution of samples to target. {source}", {"samples": chart}, mark=mark)

    if entries:
        yield "published", _draw_published(trials, claimed, entries, out, mark=mark)


def _draw_step_times(trials: TrialSet, out: Path, *, mark: str) -> Iterator[tuple[str, Shown]]:
    if not any(r.step_times_ms for r in trials.results):
        return
    path, note = out / f"step_time{mark}.png", footer(trials.hardware, len(trials.results))
    heading = f"{trials.measured}, {trials.name}"
    figures.step_time_figure(trials.results, path, heading=heading, note=note, names=trials.trial_names)
    measured = (
        "Each measurement is one step if the log has every step, else the mean of the steps between two log lines."
    )
    charts = {
        "step_time": curves.step_time_chart([trials]),
        "step_time_distribution": curves.step_time_distribution([trials]),
    }
    yield "step_time", shown(path, measured, charts, mark=mark)


def _draw_modules(trials: TrialSet, out: Path, *, mark: str) -> Iterator[tuple[str, Shown]]:
    named = zip(trials.trial_names, trials.results, strict=True)
    profiles = [(name, result.module_times) for name, result in named if result.module_times is not None]
    if profiles:
        path, heading = out / f"modules{mark}.png", f"{trials.measured}, {trials.name}"
        module_figure(profiles, path, heading=heading, note=footer(trials.hardware, len(profiles)))
        caption = "Profiled warm-up steps of rank 0; overlapping work is counted once."
        yield "modules", shown(path, caption, {"modules": bars.modules_chart(profiles)}, mark=mark)


def draw_throughput(
    trials: TrialSet, lines: Sequence[throughput.Speed], out: Path, *, mark: str
) -> Iterator[tuple[str, Shown]]:
    """Draw the figures of a set without a target, which has neither losses nor minutes."""
    yield from _draw_step_times(trials, out, mark=mark)
    yield from _draw_modules(trials, out, mark=mark)
    if lines:
        path = out / f"published{mark}.png"
        systems = [Bar(name=line.name, value=line.samples_s, ours=line.ours) for line in lines]
        heading, note = (
            f"{trials.measured}: compared with published systems",
            footer(trials.hardware, len(trials.results)),
        )
        what = "samples/s while training"
        figures.bars_figure(systems, path, heading=heading, note=note, what=what)
        caption = "Samples per second while training; dark: this set."
        yield "published", shown(path, caption, {"published": bar_chart(systems, what=what)}, mark=mark)


def _draw_published(trials: TrialSet, claimed: Claim, entries: Sequence[Entry], out: Path, *, mark: str) -> Shown:
    """Draw the minutes of published systems and, if it has any, of this set."""
    path, note = out / f"published{mark}.png", footer(trials.hardware, len(trials.results))
    with_ours, dark = (" and this set", "; dark: this set") if claimed.minutes is not None else ("", "")
    heading = f"{trials.measured}, {trials.num_gpus} GPUs: published systems{with_ours}"
    systems = [_bar(trials, claimed) if entry.ours else Bar(name=entry.name, value=entry.minutes) for entry in entries]
    longest = _MAX_BAR_RATIO * (claimed.minutes or systems[0].value)
    kept = [bar for bar in systems if bar.value <= longest] or systems
    figures.bars_figure(kept, path, heading=heading, note=note)
    beyond = f" Not shown: {len(systems) - len(kept)} above {longest:.0f} min." if len(kept) < len(systems) else ""
    caption = f"Official minutes of published systems{dark}.{beyond}"
    return shown(path, caption, {"published": bar_chart(kept, what="minutes to target")}, mark=mark)


_MAX_BAR_RATIO = 2.5
"""Longer bars are left out, since they would compress all others; the table has their values."""


def shown(path: Path, caption: str, charts: Mapping[str, Chart] | None = None, *, mark: str = "") -> Shown:
    """Return a figure for the page, with those of its charts that are not empty."""
    data = base64.b64encode(path.read_bytes()).decode()
    kept = {f"{name}{mark}": chart for name, chart in (charts or {}).items() if chart["views"]}
    return Shown(file=path.name, caption=caption, uri=f"data:image/png;base64,{data}", charts=kept)


def titled(path: Path, caption: str, charts: Charts) -> Shown:
    """Return a figure whose charts have titles."""
    one = shown(path, caption, {name: chart for name, (_, chart) in charts.items()})
    return replace(one, titles={name: title for name, (title, _) in charts.items() if title})


def draw_compared(claims: Sequence[tuple[TrialSet, Claim]], out: Path) -> Shown:
    sets = [trials for trials, _ in claims]
    where = "; ".join(dict.fromkeys(trials.hardware or "hardware not logged" for trials in sets))
    note = footer(where, sum(len(trials.results) for trials in sets))
    names = labels.short([trials.name for trials in sets])
    compared = [
        replace(_bar(trials, claimed), name=name) for (trials, claimed), name in zip(claims, names, strict=True)
    ]
    figures.bars_figure(compared, out / "sets.png", heading=f"{sets[0].measured}: sets compared", note=note)
    caption = "Minutes. In brackets, and as a whisker if it is wide enough: the 90 % interval of a score."
    return shown(out / "sets.png", caption, {"sets": bar_chart(compared, what="minutes to target", colors=COLORS)})


def _bar(trials: TrialSet, claimed: Claim) -> Bar:
    minutes = claimed.minutes or 0.0
    return Bar(name=trials.name, value=minutes, interval=claimed.interval, ours=True, remark=claimed.remark)
