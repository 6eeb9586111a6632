"""What lies ahead of a trial: its next evaluation, when it will likely reach its target, and what is wrong with it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.mlperf.benchmarks import BENCHMARKS, Goal
from bench.watch import alarm
from bench.watch.progress import Evaluated, Progress

if TYPE_CHECKING:
    from bench.mlperf.forecast import Forecast

AHEAD = 64
"""How many evaluations are looked ahead where no plan ends them."""
RECENT = 9
"""Measurements whose median is the present step time: a slower GPU shows soon, a hiccup does not."""
EVAL_ROW_STEPS = 0.4
"""Time to evaluate a row over the time to train on one: a forward pass of three, and what surrounds it. Published
llama2_70b_lora logs at batch size 8 have 0.40 to 0.45; used only before a run's first evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is known of a trial before it has logged anything; None and empty for a bare log."""

    title: str | None = None
    max_samples: int | None = None
    eval_samples: tuple[int, ...] = ()
    """When it evaluates, in samples trained on."""
    target: float | None = None
    is_published: bool = True
    """Whether it may be compared with published runs of its benchmark: a tiny model only borrows the name."""
    limit_min: float | None = None
    """When the trial is ended, counted from its first line."""


@dataclass(frozen=True, slots=True)
class Coming:
    """An evaluation to come."""

    samples: int
    minutes: float
    """What the trial's time is if it ends there."""
    probability: float
    """That the trial reaches its target there, and not before."""
    cumulative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What can be said of a trial at a moment; None is not known."""

    elapsed_s: float | None = None
    """Since run_start, up to run_stop."""
    silent_s: float | None = None
    """Since the log's latest line."""
    step_time_ms: float | None = None
    """Lately; of the whole trial once it has stopped."""
    step_time_trend: float | None = None
    """Step time lately over that of the whole trial, less 1."""
    eval_time_s: float | None = None
    eval_time_is_estimated: bool = False
    next_samples: int | None = None
    next_s: float | None = None
    """Until the result of the next evaluation."""
    coming: tuple[Coming, ...] = ()
    samples_range: tuple[float | None, float | None, float | None] | None = None
    """Samples to target: low, median and high of a 90 % range; within, None is beyond the evaluations looked ahead."""
    minutes_range: tuple[float | None, float | None, float | None] | None = None
    basis: str | None = None
    """What the forecast rests on, or why there is none."""
    left_s: float | None = None
    """Until the walltime is over."""
    chance_in_time: float | None = None
    """Of reaching the target within the walltime."""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def goal(progress: Progress, planned: Planned, metric: str | None = None) -> Goal | None:
    """Return what an evaluation must reach, by the log or else by the plan; None if nothing, or one metric of several."""
    goals = progress.goals or (() if planned.target is None else (Goal(planned.target),))
    return next((wanted for wanted in goals if wanted.metric == metric), None)


def reached(progress: Progress, planned: Planned) -> bool:
    """Return whether the last evaluation reaches the target, or one checkpoint all of several; False without one."""
    if len(progress.goals) > 1:
        done = {(e.samples, e.metric) for e in progress.evaluations if _is_reached_by(e, progress, planned)}
        return any(all((samples, wanted.metric) in done for wanted in progress.goals) for samples, _ in done)
    return bool(progress.evaluations) and _is_reached_by(progress.evaluations[-1], progress, planned)


def _is_reached_by(evaluated: Evaluated, progress: Progress, planned: Planned) -> bool:
    wanted = goal(progress, planned, evaluated.metric)
    return wanted is not None and wanted.is_reached_by(evaluated.value)


def due(progress: Progress, planned: Planned) -> tuple[int, ...]:
    """Return when the trial will evaluate, in samples, an evaluation that goes on included; empty where nothing says.

    As planned, else at the intervals of its benchmark's rules, else at the latest interval of its own.
    """
    done = [evaluated.samples for evaluated in progress.evaluations if evaluated.samples is not None]
    last = done[-1] if done else 0
    if planned.eval_samples:
        return tuple(samples for samples in planned.eval_samples if samples > last)
    known, gbs = BENCHMARKS.get(progress.benchmark or ""), progress.global_batch_size
    rules = known.schedule if known else None
    if rules and gbs:
        first, interval = rules.first(gbs), rules.interval(gbs)
    elif len(done) > 1 and done[-1] > done[-2]:
        first, interval = 0, done[-1] - done[-2]
    else:
        return ()
    start = last + interval if done else first
    return tuple(range(start, start + AHEAD * interval, interval))


def look(progress: Progress, planned: Planned, now_ms: int) -> Outlook:
    """Return what lies ahead of the trial at this moment."""
    start, stop, is_over = progress.run_start_ms, progress.run_stop_ms, progress.phase == "stopped"
    usual = progress.step_time_ms
    lately = usual if is_over else _lately_ms(progress)
    eval_time_s = progress.eval_time_s or _estimated_eval_time_s(progress)
    is_guessed = progress.eval_time_is_estimated or not progress.eval_times_s
    seen = Outlook(
        elapsed_s=None if start is None else max(0, (stop or now_ms) - start) / 1000,
        step_time_ms=lately,
        step_time_trend=lately / usual - 1 if lately and usual and not is_over else None,
        eval_time_s=eval_time_s,
        eval_time_is_estimated=eval_time_s is not None and is_guessed,
        warnings=tuple(alarm.divergence(progress)),
    )
    if is_over or progress.last_ms is None:
        return seen
    seen = replace(seen, silent_s=max(0, now_ms - progress.last_ms) / 1000, left_s=_left_s(progress, planned, now_ms))
    return seen if start is None else _ahead(seen, progress, planned, now_ms)


def _ahead(seen: Outlook, progress: Progress, planned: Planned, now_ms: int) -> Outlook:
    """Return the outlook with what the coming evaluations may bring; when, only while training goes on."""
    upcoming = due(progress, planned)
    seen = replace(seen, next_samples=upcoming[0] if upcoming else None)
    usual_s = alarm.usual_silence_s(
        progress, step_time_ms=seen.step_time_ms, eval_time_s=seen.eval_time_s, next_samples=seen.next_samples
    )
    stalled = tuple(alarm.stall(progress, silent_s=seen.silent_s, usual_s=usual_s))
    arrivals = {} if stalled else dict(_arrivals(seen, progress, upcoming, now_ms))
    made, basis, off_band = _forecast_of(progress, planned, upcoming)
    next_s = arrivals[upcoming[0]] if arrivals else None
    seen = replace(seen, next_s=next_s, basis=basis)
    if made is not None:
        seen = _forecasting(seen, made, arrivals)
    chance = _chance_in_time(seen, arrivals)
    unlike = [] if off_band is None else [f"outside the reference band: {off_band}"]
    too_late = alarm.too_late(seen.left_s, next_s=next_s, chance=chance)
    return replace(seen, chance_in_time=chance, warnings=(*seen.warnings, *unlike, *stalled, *too_late))


def _forecasting(seen: Outlook, made: "Forecast", arrivals: dict[int, float]) -> Outlook:
    """Return the outlook with the forecast, in minutes as well once this trial's own pace is known."""
    bounds = made.samples_low, made.samples_median, made.samples_high
    if not arrivals or seen.elapsed_s is None:
        return replace(seen, samples_range=bounds)
    minutes = {float(samples): (seen.elapsed_s + seconds) / 60 for samples, seconds in arrivals.items()}
    low, middle, high = (None if bound is None else minutes.get(bound) for bound in bounds)
    coming = tuple(
        Coming(int(chance.samples), minutes[chance.samples], chance.probability, chance.cumulative)
        for chance in made.chances
        if chance.samples in minutes
    )
    return replace(seen, samples_range=bounds, minutes_range=(low, middle, high), coming=coming)


def _lately_ms(progress: Progress) -> float | None:
    return median(progress.step_times_ms[-RECENT:]) if progress.step_times_ms else None


def _estimated_eval_time_s(progress: Progress) -> float | None:
    rows, gbs, step_time_ms = progress.num_eval_rows, progress.global_batch_size, _lately_ms(progress)
    return rows * step_time_ms / gbs * EVAL_ROW_STEPS / 1000 if rows and gbs and step_time_ms else None


def _left_s(progress: Progress, planned: Planned, now_ms: int) -> float | None:
    if planned.limit_min is None or progress.first_ms is None:
        return None
    return planned.limit_min * 60 - (now_ms - progress.first_ms) / 1000


def _arrivals(seen: Outlook, progress: Progress, upcoming: tuple[int, ...], now_ms: int) -> Iterator[tuple[int, float]]:
    """Yield each coming evaluation, in samples, and the seconds until its result is there, at the present pace."""
    gbs, place, eval_time_s = progress.global_batch_size, progress.place, seen.eval_time_s
    if not gbs or seen.step_time_ms is None or eval_time_s is None:
        return
    if place is not None:
        trained, since_ms = place.samples, place.time_ms
        busy_s = max(0, upcoming[0] - trained) / gbs * seen.step_time_ms / 1000 if upcoming else 0.0
    elif progress.eval_start_ms is not None and progress.samples is not None:
        trained, since_ms = progress.samples, progress.eval_start_ms
        busy_s = eval_time_s if upcoming and upcoming[0] <= trained else 0.0  # else its result is there
    else:
        return
    done_s = min(busy_s, max(0, now_ms - since_ms) / 1000)
    for number, samples in enumerate(upcoming, 1):
        steps = max(0, samples - trained) / gbs
        yield samples, steps * seen.step_time_ms / 1000 + number * eval_time_s - done_s


def _forecast_of(
    progress: Progress, planned: Planned, upcoming: tuple[int, ...]
) -> "tuple[Forecast | None, str, str | None]":
    """Return the forecast, what it rests on or why there is none, and how the trial is unlike published ones if it is."""
    wanted, benchmark, gbs = goal(progress, planned), progress.benchmark, progress.global_batch_size
    if wanted is None:
        return None, "the benchmark has several targets" if progress.goals else "no target is known", None
    if not planned.is_published:
        return None, f"{planned.title} is not a model of which runs are published", None
    if benchmark is None or gbs is None:
        return None, "the log names no benchmark or no global batch size", None
    evaluations = tuple((e.samples, e.value) for e in progress.evaluations if e.samples is not None)
    if (off_band := _off_band(evaluations, benchmark, gbs)) is not None:
        return None, "this run is unlike the published ones", off_band
    made = _forecast(evaluations, benchmark, gbs, wanted.value, upcoming)
    if made is not None:
        return made, made.source, None
    return None, f"no published runs of {benchmark} to target {wanted.value:g} at global batch size {gbs}", None


@lru_cache(maxsize=32)
def _forecast(
    evaluations: tuple[tuple[float, float], ...], benchmark: str, gbs: int, target: float, grid: tuple[int, ...]
) -> "Forecast | None":
    """Kept, as it changes with an evaluation only and is looked at every second."""
    from bench.mlperf.forecast import forecast

    return forecast(evaluations, benchmark=benchmark, global_batch_size=gbs, target=target, grid=grid or None)


@lru_cache(maxsize=32)
def _off_band(evaluations: tuple[tuple[float, float], ...], benchmark: str, gbs: int) -> str | None:
    """Return the latest evaluation beside the reference band, if most lie outside."""
    from bench.mlperf.forecast import band, outside_band

    if not outside_band(evaluations, benchmark=benchmark, global_batch_size=gbs):
        return None
    points = {point.samples: point for point in band(benchmark, gbs)}
    for samples, loss in reversed(evaluations):
        if samples in points:
            low, high = points[int(samples)].low, points[int(samples)].high
            return f"{loss:.4f} at {samples:,} samples, published runs have {low:.4f} to {high:.4f}"
    return "published runs have other losses"


def _chance_in_time(seen: Outlook, arrivals: dict[int, float]) -> float | None:
    """Return 0 where not even the next evaluation ends within the walltime."""
    if seen.left_s is None or not arrivals:
        return None
    in_time = {samples for samples, seconds in arrivals.items() if seconds <= seen.left_s}
    if not in_time:
        return 0.0
    return sum(c.probability for c in seen.coming if c.samples in in_time) if seen.coming else None
