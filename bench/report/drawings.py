"""The figures of the page: which ones a set has data for, and what their captions say."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.mlperf import forecast, published
from bench.report import figures, throughput
from bench.report.canvas import footer
from bench.report.compare import Claim, Entry
from bench.report.figures import Bar
from bench.report.sets import TrialSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A figure as it is embedded in the page."""

    file: str
    caption: str
    uri: str


def draw_training(
    trials: TrialSet, claimed: Claim, entries: Sequence[Entry], out: Path, *, mark: str
) -> Iterator[tuple[str, Path, str]]:
    """Draw the figures that the trials have data for; yield each figure's key, file and caption."""
    s, note = trials.score, footer(trials.hardware, len(trials.results))
    benchmark, gbs = None if trials.pretends else s.benchmark, s.global_batch_size
    heading = f"{trials.measured}, {trials.name}"

    path = out / f"convergence{mark}.png"
    band = [(p.samples, p.low, p.high) for p in forecast.band(benchmark, gbs)]
    figures.convergence_figure(trials.results, path, heading=heading, note=note, band=band)
    shade = " Shaded: where published runs of this benchmark and batch size lie." if band else ""
    bad = "" if all(r.valid for r in trials.results) else " Red and dotted: not a valid trial."
    yield "convergence", path, f"Every evaluation of every trial; the large dot is its last.{bad}{shade}"

    yield from _draw_step_times(trials, out, mark=mark)

    known = published.samples_to_target(benchmark, gbs) if benchmark and gbs else None
    if known and s.samples_distribution:
        path = out / f"samples{mark}.png"
        figures.samples_figure(s.samples_distribution, known, path, heading=heading, note=note)
        source = f"Published: {known.kind}, {known.source}."
        yield "samples", path, f"Trials by the samples they took to the target. {source}"

    if entries:
        path = out / f"published{mark}.png"
        yield "published", path, _draw_published(trials, claimed, entries, path, note=note)


def _draw_step_times(trials: TrialSet, out: Path, *, mark: str) -> Iterator[tuple[str, Path, str]]:
    if not any(r.step_times_ms for r in trials.results):
        return
    path, note = out / f"step_time{mark}.png", footer(trials.hardware, len(trials.results))
    heading = f"{trials.measured}, {trials.name}"
    figures.step_time_figure(trials.results, path, heading=heading, note=note, names=trials.trial_names)
    measured = (
        "Each measurement is one step, where the log lists them, else the mean over the steps between two log lines."
    )
    yield "step_time", path, measured


def draw_throughput(
    trials: TrialSet, lines: Sequence[throughput.Speed], out: Path, *, mark: str
) -> Iterator[tuple[str, Path, str]]:
    """Draw the figures of a run on random weights, which has neither losses nor minutes."""
    yield from _draw_step_times(trials, out, mark=mark)
    if lines:
        path = out / f"published{mark}.png"
        bars = [Bar(name=line.name, value=line.samples_s, ours=line.ours) for line in lines]
        heading, note = (
            f"{trials.measured}: beside published systems",
            footer(trials.hardware, len(trials.results)),
        )
        figures.bars_figure(bars, path, heading=heading, note=note, what="samples/s while training")
        yield "published", path, "Samples per second while training; dark, this set's."


def _draw_published(trials: TrialSet, claimed: Claim, entries: Sequence[Entry], path: Path, *, note: str) -> str:
    """Draw published systems and, if it has a time, this set; return the caption."""
    with_ours, dark = (" and this set", "; dark, this set's") if claimed.minutes is not None else ("", "")
    heading = f"{trials.measured}, {trials.num_gpus} GPUs: published systems{with_ours}"
    bars = [_bar(trials, claimed) if entry.ours else Bar(name=entry.name, value=entry.minutes) for entry in entries]
    longest = _MAX_BAR_RATIO * (claimed.minutes or bars[0].value)
    drawn = [bar for bar in bars if bar.value <= longest] or bars
    figures.bars_figure(drawn, path, heading=heading, note=note)
    beyond = f" Not drawn: {len(bars) - len(drawn)} above {longest:.0f} min." if len(drawn) < len(bars) else ""
    return f"Official minutes of published systems{dark}.{beyond}"


_MAX_BAR_RATIO = 2.5
"""A published time far beyond this set's would press all other bars together; the table has it."""


def shown(path: Path, caption: str) -> Shown:
    data = base64.b64encode(path.read_bytes()).decode()
    return Shown(file=path.name, caption=caption, uri=f"data:image/png;base64,{data}")


def draw_compared(drawn: Sequence[tuple[TrialSet, Claim]], out: Path) -> Shown:
    sets = [trials for trials, _ in drawn]
    where = "; ".join(dict.fromkeys(trials.hardware or "hardware not logged" for trials in sets))
    note = footer(where, sum(len(trials.results) for trials in sets))
    bars = [_bar(trials, claimed) for trials, claimed in drawn]
    figures.bars_figure(bars, out / "sets.png", heading=f"{sets[0].measured}: sets compared", note=note)
    return shown(
        out / "sets.png",
        "Minutes from zero; in brackets, and as a whisker where it can be seen, the 90 % interval of a score.",
    )


def _bar(trials: TrialSet, claimed: Claim) -> Bar:
    minutes = claimed.minutes or 0.0
    return Bar(name=trials.name, value=minutes, interval=claimed.interval, ours=True, remark=claimed.remark)
