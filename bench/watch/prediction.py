"""Forecast a running trial: its next evaluation, when it likely reaches its target, and warnings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import hypot, sqrt
from statistics import NormalDist, median, stdev
from typing import TYPE_CHECKING

from bench.contract.stall import Stall
from bench.mlperf.benchmarks import BENCHMARKS, Goal, has_lora
from bench.mlperf.published import evaluation_row
from bench.watch import progress as watch_progress
from bench.watch.progress import Evaluated, Progress

if TYPE_CHECKING:
    from bench.mlperf.forecast import Forecast


RECENT = 9
"""The current step time is the median of this many measurements: robust to outliers, quick to show a slower GPU."""
PACE_SHARE = 0.90
"""Coverage of a time range."""
STEP_DRIFT = 0.015
"""Minimum half-width of the step time's range, relative to the step time: the drift in published runs."""
STEP_DRIFT_INITIAL = 0.10
"""The same with fewer than three measurements."""
EVAL_AFTER_FIRST_LOW, EVAL_AFTER_FIRST_HIGH = 0.70, 1.02
"""Time of later evaluations / time of the first, which includes warm-up in some runs; quantiles of the same runs."""
EVAL_DRIFT = 0.03
"""Minimum half-width of the evaluation time's range, relative to it, after the second evaluation."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time in seconds with its 90 % range."""

    typical: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class EvaluationEta:
    """An upcoming evaluation, and the time until its result."""

    samples: int
    seconds: Span


def step_time_s(progress: Progress) -> Span | None:
    """Return the current time of an optimizer step; None before the first measurement."""
    recent = [time_ms / 1000 for time_ms in progress.step_times_ms[-RECENT:]]
    if not recent:
        return None
    return _around(recent, least=STEP_DRIFT if len(recent) > 2 else STEP_DRIFT_INITIAL)


def published_step_time_s(progress: Progress, upcoming: Sequence[int], now_ms: int) -> Span | None:
    """Return the range of the step time before the first measurement, from published systems; None without any.

    Each published system of this batch size whose first evaluation would not be over yet counts once; one more is
    a system that is slower than it must be by a factor f with probability 1 / f. The range starts at the fastest
    possible pace, since an evaluation is often due just then.
    """
    gbs, start_ms, rows = progress.global_batch_size, progress.run_start_ms, progress.num_eval_rows
    if not gbs or start_ms is None or not rows or not upcoming or progress.evaluations:
        return None
    known = _published_step_times_s(progress.benchmark or "", gbs, rows)
    if not known:
        return None
    least_s = (
        max(0, now_ms - start_ms) / 1000 / ((upcoming[0] + evaluation_row(has_lora=progress.has_lora).low * rows) / gbs)
    )
    least_s = max(least_s, min(known) / SLOWER[0])
    times_s = sorted(
        [*(time_s for time_s in known if time_s >= least_s for _ in SLOWER), *(least_s * f for f in SLOWER)]
    )
    typical, high = (times_s[int(share * len(times_s))] for share in (0.5, (1 + PACE_SHARE) / 2))
    return Span(typical, least_s, high)


@lru_cache(maxsize=8)
def _published_step_times_s(benchmark: str, gbs: int, num_eval_rows: int) -> tuple[float, ...]:
    """Return the step time of each published system with this batch size, or of all systems, each at its own.

    From its minutes and samples, since not every log has step times; an evaluation row takes `evaluation_row` of a
    training row.
    """
    from bench.mlperf.published import schedule, systems

    row = evaluation_row(has_lora=has_lora(BENCHMARKS.get(benchmark)))
    times_s: dict[int, list[float]] = {}
    for system in systems(benchmark):
        own_gbs, samples, minutes = system.global_batch_size, system.mean_samples, system.olympic_minutes
        if own_gbs and samples and minutes:
            due = schedule(benchmark)
            evaluations = (samples - due.first(own_gbs)) / due.interval(own_gbs) + 1
            rows = samples + row.typical * evaluations * num_eval_rows
            times_s.setdefault(own_gbs, []).append(minutes * 60 / rows * own_gbs)
    same = times_s.get(gbs, [])
    return tuple(same if len(same) >= FEWEST_SYSTEMS else (time_s for each in times_s.values() for time_s in each))


def eval_time_s(progress: Progress, step: Span | None = None) -> Span | None:
    """Return the time of an upcoming evaluation, from later ones, else from the first, else from the step time."""
    first, *later = progress.eval_times_s or (None,)
    if later:
        return _around(later[-RECENT:], least=EVAL_DRIFT)
    if first is not None:
        return Span(first, EVAL_AFTER_FIRST_LOW * first, EVAL_AFTER_FIRST_HIGH * first)
    rows, gbs, step = progress.num_eval_rows, progress.global_batch_size, step or step_time_s(progress)
    if not rows or not gbs or step is None:
        return None
    row, trained_s = evaluation_row(has_lora=progress.has_lora), rows * step.typical / gbs
    return Span(trained_s * row.typical, trained_s * row.low, trained_s * row.high)


def evaluation_etas(
    progress: Progress, upcoming: Sequence[int], now_ms: int, *, step: Span | None
) -> Iterator[EvaluationEta]:
    """Yield the time until each upcoming evaluation ends; nothing while speed or progress are unknown."""
    gbs, evaluation = progress.global_batch_size, eval_time_s(progress, step)
    if not gbs or step is None or evaluation is None or not upcoming:
        return
    if (place := progress.place) is not None:
        trained, since_ms = place.samples, place.time_ms
        busy_s = max(0, upcoming[0] - trained) / gbs * step.typical
    elif progress.eval_start_ms is not None and progress.samples is not None:
        trained, since_ms = progress.samples, progress.eval_start_ms
        busy_s = evaluation.typical if upcoming[0] <= trained else 0.0  # else its result is already logged
    else:
        return
    done_s = min(busy_s, max(0, now_ms - since_ms) / 1000)
    for number, samples in enumerate(upcoming, 1):
        yield EvaluationEta(samples, _remaining(step, max(0, samples - trained) / gbs, evaluation, number, done_s))


def _remaining(step: Span, num_steps: float, evaluation: Span, num_evals: int, done_s: float) -> Span:
    """Return the remaining time of steps and evaluations; their errors are independent."""
    typical = num_steps * step.typical + num_evals * evaluation.typical - done_s
    sooner = hypot(num_steps * (step.typical - step.low), num_evals * (evaluation.typical - evaluation.low))
    later = hypot(num_steps * (step.high - step.typical), num_evals * (evaluation.high - evaluation.typical))
    return Span(typical, max(0.0, typical - sooner), typical + later)


def _around(times_s: Sequence[float], *, least: float) -> Span:
    """Return the median and the range of the next time (Student's t); `least` is the minimum relative half-width."""
    from scipy.special import stdtrit

    middle, count, half = median(times_s), len(times_s), 0.0
    if count > 2:
        half = float(stdtrit(count - 1, (1 + PACE_SHARE) / 2)) * stdev(times_s) * sqrt(1 + 1 / count)
    half = max(half, least * middle)
    return Span(middle, max(0.0, middle - half), middle + half)


SLOWER = tuple(1 / (1 - (place + 0.5) / 20) for place in range(20))
"""The factors by which a system may be slower than it must be, each with the same probability."""
FEWEST_SYSTEMS = 5
"""With fewer published systems of a batch size, those of all batch sizes count."""
MAX_UPCOMING = 64
"""The number of upcoming evaluations in the forecast if no plan limits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the plan determines for a trial; None and empty for a log without a plan."""

    title: str | None = None
    max_samples: int | None = None
    eval_samples: tuple[int, ...] = ()
    """The samples trained on at each evaluation."""
    target: float | None = None
    is_published: bool = True
    """Whether it may be compared with published runs: false for a tiny model with a benchmark's name."""
    limit_min: float | None = None
    """Time limit of the trial, from its first log line."""
    stall: Stall | None = None
    """The settings of the ranks' stall watchdog."""


@dataclass(frozen=True, slots=True)
class Coming:
    """An upcoming evaluation, and the probability that the evaluation reaches the target."""

    samples: int
    minutes: float
    """The trial's time if it ends there."""
    minutes_low: float
    """The range of that time is minutes_low to minutes_high; it includes uncertainty of the trial's speed."""
    minutes_high: float
    probability: float
    """The probability that this evaluation is the first that reaches the target."""
    cumulative: float
    """The probability that this evaluation or an earlier evaluation reaches the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The forecast of a trial at one moment; None means unknown."""

    elapsed_s: float | None = None
    """The time since run_start, or until run_stop."""
    silent_s: float | None = None
    """The time since the latest line of the log."""
    step_time_ms: float | None = None
    """The recent step time; that of the whole trial after it has stopped."""
    step_time_trend: float | None = None
    """The recent step time divided by that of the whole trial, minus 1."""
    eval_time_s: float | None = None
    eval_time_is_estimated: bool = False
    next_samples: int | None = None
    next_s: float | None = None
    """The time until the result of the next evaluation."""
    coming: tuple[Coming, ...] = ()
    samples_range: tuple[float | None, float | None, float | None] | None = None
    """Samples to target: low, median and high of a 90 % range. None: after the last evaluation of the forecast."""
    minutes_range: tuple[float | None, float | None, float | None] | None = None
    """The same in minutes; low and high include uncertainty of the trial's speed."""
    basis: str | None = None
    """What the forecast is based on, or why there is none."""
    left_s: float | None = None
    """The remaining walltime."""
    chance_in_time: float | None = None
    """The probability of reaching the target within the walltime."""
    warnings: tuple[str, ...] = ()


def goal(progress: Progress, planned: Planned, metric: str | None = None) -> Goal | None:
    """Return the target of an evaluation, from the log or else from the plan; None without a (single) target."""
    goals = progress.goals or (() if planned.target is None else (Goal(planned.target),))
    return next((target for target in goals if target.metric == metric), None)


def reached(progress: Progress, planned: Planned) -> bool:
    """Return whether the last evaluation reached the target; with several targets, whether all were at one point."""
    if len(progress.goals) > 1:
        done = {(e.samples, e.metric) for e in progress.evaluations if _is_reached_by(e, progress, planned)}
        return any(all((samples, target.metric) in done for target in progress.goals) for samples, _ in done)
    return bool(progress.evaluations) and _is_reached_by(progress.evaluations[-1], progress, planned)


def _is_reached_by(evaluated: Evaluated, progress: Progress, planned: Planned) -> bool:
    target = goal(progress, planned, evaluated.metric)
    return target is not None and target.is_reached_by(evaluated.value)


def due(progress: Progress, planned: Planned) -> tuple[int, ...]:
    """Return the samples at which the trial will evaluate, including a running evaluation; empty if unknown.

    Taken from the plan; without one, from the latest interval between the trial's evaluations; before the second
    evaluation, from the schedule in the benchmark's rules.
    """
    done = [evaluated.samples for evaluated in progress.evaluations if evaluated.samples is not None]
    last = done[-1] if done else 0
    if planned.eval_samples:
        return tuple(samples for samples in planned.eval_samples if samples > last)
    known, gbs = BENCHMARKS.get(progress.benchmark or ""), progress.global_batch_size
    rules, own = known.schedule if known else None, done[-1] - done[-2] if len(done) > 1 else 0
    if own > 0:
        interval = own
    elif rules and gbs:
        interval = rules.interval(gbs)
    else:
        return ()
    start = last + interval if done or not rules or not gbs else rules.first(gbs)
    return tuple(range(start, start + MAX_UPCOMING * interval, interval))


def look(progress: Progress, planned: Planned, now_ms: int) -> Outlook:
    """Return the forecast of the trial at this moment."""
    start, stop, is_over = progress.run_start_ms, progress.run_stop_ms, progress.phase == "stopped"
    usual, step, evaluation = progress.step_time_ms, step_time_s(progress), eval_time_s(progress)
    lately = usual if is_over or step is None else step.typical * 1000
    is_guessed = progress.eval_time_is_estimated or not progress.eval_times_s
    seen = Outlook(
        elapsed_s=None if start is None else max(0, (stop or now_ms) - start) / 1000,
        step_time_ms=lately,
        step_time_trend=lately / usual - 1 if lately and usual and not is_over else None,
        eval_time_s=evaluation.typical if evaluation else None,
        eval_time_is_estimated=evaluation is not None and is_guessed,
        warnings=(*watch_progress.divergence(progress), *progress.slow),
    )
    if is_over or progress.last_ms is None:
        return seen
    seen = replace(seen, silent_s=max(0, now_ms - progress.last_ms) / 1000, left_s=_left_s(progress, planned, now_ms))
    return seen if start is None else _ahead(seen, progress, planned, now_ms)


def _ahead(seen: Outlook, progress: Progress, planned: Planned, now_ms: int) -> Outlook:
    """Return the outlook with the forecast of upcoming evaluations; with times only while training continues."""
    upcoming = due(progress, planned)
    seen = replace(seen, next_samples=upcoming[0] if upcoming else None)
    usual_s = watch_progress.usual_silence_s(
        progress, step_time_ms=seen.step_time_ms, eval_time_s=seen.eval_time_s, next_samples=seen.next_samples
    )
    stalled = tuple(watch_progress.stall(progress, silent_s=seen.silent_s, usual_s=usual_s, limits=planned.stall))
    step = step_time_s(progress)
    ahead = () if stalled else tuple(evaluation_etas(progress, upcoming, now_ms, step=step))
    forecast, basis, off_band = _forecast_of(progress, planned, upcoming)
    next_s = ahead[0].seconds.typical if ahead else None
    chance = None
    if forecast is not None and step is None:
        published = published_step_time_s(progress, upcoming, now_ms)
        ahead = tuple(evaluation_etas(progress, upcoming, now_ms, step=published))
        basis = f"{basis}; pace of published systems, until a step is measured" if ahead else basis
    seen = replace(seen, next_s=next_s, basis=basis)
    if forecast is not None:
        seen = _forecasting(seen, forecast, ahead)
    if step is not None:
        chance = _chance_in_time(seen, ahead)
    unlike = [] if off_band is None else [f"outside the reference band: {off_band}"]
    too_late = watch_progress.too_late(seen.left_s, next_s=next_s, chance=chance)
    return replace(seen, chance_in_time=chance, warnings=(*seen.warnings, *unlike, *stalled, *too_late))


def _forecasting(seen: Outlook, forecast: "Forecast", ahead: Sequence[EvaluationEta]) -> Outlook:
    """Return the outlook with the forecast in samples, and in minutes if the trial's speed is known."""
    bounds = forecast.samples_low, forecast.samples_median, forecast.samples_high
    if not ahead or seen.elapsed_s is None:
        return replace(seen, samples_range=bounds)
    minutes = {float(eta.samples): _minutes(seen.elapsed_s, eta.seconds) for eta in ahead}
    low, middle, high = (None if bound is None else minutes.get(bound) for bound in bounds)
    coming = tuple(
        Coming(int(chance.samples), at.typical, at.low, at.high, chance.probability, chance.cumulative)
        for chance in forecast.chances
        if (at := minutes.get(chance.samples)) is not None
    )
    edges = low.low if low else None, middle.typical if middle else None, high.high if high else None
    return replace(seen, samples_range=bounds, minutes_range=edges, coming=coming)


def _minutes(elapsed_s: float, ahead: Span) -> Span:
    low, typical, high = ((elapsed_s + seconds) / 60 for seconds in (ahead.low, ahead.typical, ahead.high))
    return Span(typical, low, high)


def _left_s(progress: Progress, planned: Planned, now_ms: int) -> float | None:
    if planned.limit_min is None or progress.first_ms is None:
        return None
    return planned.limit_min * 60 - (now_ms - progress.first_ms) / 1000


def _forecast_of(
    progress: Progress, planned: Planned, upcoming: tuple[int, ...]
) -> "tuple[Forecast | None, str, str | None]":
    """Return the forecast, its basis or why there is none, and a loss outside the reference band."""
    target, benchmark, gbs = goal(progress, planned), progress.benchmark, progress.global_batch_size
    if target is None:
        return None, "the benchmark has several targets" if progress.goals else "no target", None
    if not planned.is_published:
        return None, f"no published runs of {planned.title}", None
    if benchmark is None or gbs is None:
        return None, "no benchmark or no global batch size in the log", None
    evaluations = tuple((e.samples, e.value) for e in progress.evaluations if e.samples is not None)
    off_band = _off_band(evaluations, benchmark, gbs)
    forecast = _forecast(evaluations, benchmark, gbs, target.value, upcoming)
    if forecast is not None:
        return forecast, forecast.source, off_band
    if off_band is not None:
        return None, "the losses are outside of all published runs", off_band
    return None, f"no published runs of {benchmark} to target {target.value:g} at global batch size {gbs}", None


@lru_cache(maxsize=32)
def _forecast(
    evaluations: tuple[tuple[float, float], ...], benchmark: str, gbs: int, target: float, grid: tuple[int, ...]
) -> "Forecast | None":
    """Return the forecast; cached, since it changes only after an evaluation but is shown every second."""
    from bench.mlperf.forecast import forecast

    return forecast(evaluations, benchmark=benchmark, global_batch_size=gbs, target=target, grid=grid or None)


@lru_cache(maxsize=32)
def _off_band(evaluations: tuple[tuple[float, float], ...], benchmark: str, gbs: int) -> str | None:
    """Return the latest loss outside the reference band and the band there as text; None unless most are outside."""
    from bench.mlperf.forecast import latest_outside

    outside = latest_outside(evaluations, benchmark=benchmark, global_batch_size=gbs)
    if outside is None:
        return None
    loss, point = outside
    return f"{loss:.4f} at {point.samples:,} samples; 99 % of published runs: {point.low:.4f} to {point.high:.4f}"


def _chance_in_time(seen: Outlook, ahead: Sequence[EvaluationEta]) -> float | None:
    """Return the probability to reach the target in time; 0 if even a fast next evaluation ends after the walltime."""
    left_s = seen.left_s
    if left_s is None or not ahead:
        return None
    following = ahead[0].seconds
    if left_s < (following.low if seen.coming else following.typical):
        return 0.0
    in_time = {eta.samples: _chance_within(eta.seconds, left_s) for eta in ahead}
    return sum(c.probability * in_time.get(c.samples, 0.0) for c in seen.coming) if seen.coming else None


def _chance_within(time: Span, limit_s: float) -> float:
    """Return the probability that a time is at most a limit: a normal distribution on each side of the typical time."""
    width = time.high - time.typical if limit_s > time.typical else time.typical - time.low
    if width <= 0:
        return float(limit_s >= time.typical)
    return NormalDist().cdf(NormalDist().inv_cdf((1 + PACE_SHARE) / 2) * (limit_s - time.typical) / width)
