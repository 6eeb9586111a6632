"""When the coming evaluations will end: at the trial's own pace, with a range for how far that pace may be off."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import hypot, sqrt
from statistics import median, stdev

from bench.watch.progress import Progress

RECENT = 9
"""The present step time is the median of so many measurements: a slower GPU shows soon, a single hiccup does not."""
PACE_SHARE = 0.90
"""Probability that a range of times is meant to hold."""
STEP_DRIFT = 0.015
"""Least half width of the range of the step time, over the step time: the pace of published runs drifts by as much."""
STEP_UNSURE = 0.10
"""The same before there are three measurements."""
EVAL_ROW_STEPS, EVAL_ROW_STEPS_LOW, EVAL_ROW_STEPS_HIGH = 0.45, 0.39, 1.10
"""Time to evaluate a row over the time to train on one, used before a trial's first evaluation: typical, low and high.
In 844 published llama2_70b_lora runs the median, 5 % and 95 % quantile are 0.46, 0.40 and 1.11 for the first
evaluation, and 0.45, 0.39 and 0.82 for the later ones."""
EVAL_AFTER_FIRST_LOW, EVAL_AFTER_FIRST_HIGH = 0.70, 1.02
"""Time of the later evaluations over that of the first, which in some runs still warms up; quantiles of the same
runs."""
EVAL_DRIFT = 0.03
"""Least half width of the range of the evaluation time, over the evaluation time, once later ones have been seen."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time in seconds, and a range that is meant to hold it with 90 %."""

    typical: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """A coming evaluation, and in how many seconds its result will be there."""

    samples: int
    seconds: Span


def step_time_s(progress: Progress) -> Span | None:
    """Return the present time of an optimizer step; None before the first measurement."""
    recent = [time_ms / 1000 for time_ms in progress.step_times_ms[-RECENT:]]
    if not recent:
        return None
    return _around(recent, least=STEP_DRIFT if len(recent) > 2 else STEP_UNSURE)


def eval_time_s(progress: Progress) -> Span | None:
    """Return the time of the coming evaluations: as the later ones took, else by the first, else by the step time."""
    first, *later = progress.eval_times_s or (None,)
    if later:
        return _around(later[-RECENT:], least=EVAL_DRIFT)
    if first is not None:
        return Span(first, EVAL_AFTER_FIRST_LOW * first, EVAL_AFTER_FIRST_HIGH * first)
    rows, gbs, step = progress.num_eval_rows, progress.global_batch_size, step_time_s(progress)
    if not rows or not gbs or step is None:
        return None
    row_s = rows * step.typical / gbs
    return Span(row_s * EVAL_ROW_STEPS, row_s * EVAL_ROW_STEPS_LOW, row_s * EVAL_ROW_STEPS_HIGH)


def arrivals(progress: Progress, upcoming: Sequence[int], now_ms: int) -> Iterator[Arrival]:
    """Yield when each coming evaluation will end; nothing while the pace or the place in training is not known."""
    gbs, step, evaluation = progress.global_batch_size, step_time_s(progress), eval_time_s(progress)
    if not gbs or step is None or evaluation is None or not upcoming:
        return
    if (place := progress.place) is not None:
        trained, since_ms = place.samples, place.time_ms
        busy_s = max(0, upcoming[0] - trained) / gbs * step.typical
    elif progress.eval_start_ms is not None and progress.samples is not None:
        trained, since_ms = progress.samples, progress.eval_start_ms
        busy_s = evaluation.typical if upcoming[0] <= trained else 0.0  # else its result is there
    else:
        return
    done_s = min(busy_s, max(0, now_ms - since_ms) / 1000)
    for number, samples in enumerate(upcoming, 1):
        yield Arrival(samples, _ahead(step, max(0, samples - trained) / gbs, evaluation, number, done_s))


def _ahead(step: Span, num_steps: float, evaluation: Span, num_evals: int, done_s: float) -> Span:
    """Return the time of steps and evaluations, less what has passed; the errors of the two are independent."""
    typical = num_steps * step.typical + num_evals * evaluation.typical - done_s
    sooner = hypot(num_steps * (step.typical - step.low), num_evals * (evaluation.typical - evaluation.low))
    later = hypot(num_steps * (step.high - step.typical), num_evals * (evaluation.high - evaluation.typical))
    return Span(typical, max(0.0, typical - sooner), typical + later)


def _around(times_s: Sequence[float], *, least: float) -> Span:
    """Return the median of times and the range of the next one, by Student's t; `least` is its minimal half width."""
    from scipy.special import stdtrit

    middle, count, half = median(times_s), len(times_s), 0.0
    if count > 2:
        half = float(stdtrit(count - 1, (1 + PACE_SHARE) / 2)) * stdev(times_s) * sqrt(1 + 1 / count)
    half = max(half, least * middle)
    return Span(middle, max(0.0, middle - half), middle + half)
