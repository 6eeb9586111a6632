"""Compute the speed of a trial from its log: step times, evaluation times, throughput, MFU."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from bench.contract import mllog
from bench.mlperf import gpu_count
from bench.mlperf.log import Log, Stretch, number
from bench.mlperf.reader import Event, is_number


def listed_s(event: Event) -> list[float]:
    """Return the step times in a record; empty if it has none, or not only numbers."""
    listed = event.value.get(mllog.STEP_TIMES) if isinstance(event.value, dict) else None
    return listed if isinstance(listed, list) and all(map(is_number, listed)) else []


def step_times_ms(log: Log) -> list[tuple[float, float]]:
    """Return (samples, milliseconds) of each step, as listed by our own runs; empty if none are listed."""
    step_times: list[tuple[float, float]] = []
    gbs = log.integer(mllog.GLOBAL_BATCH_SIZE)
    for event in log.all(mllog.TRACKED_STATS):
        samples, listed = number(event.metadata.get("samples_count")), listed_s(event)
        if not gbs or samples is None:
            continue
        first = samples - gbs * (len(listed) - 1)
        step_times += [(first + gbs * place, 1000 * seconds) for place, seconds in enumerate(listed) if seconds > 0]
    return step_times


def evaluations(events: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield the eval_start and the eval_stop of each evaluation."""
    start: Event | None = None
    for event in events:
        if event.key == mllog.EVAL_START:
            start = event
        elif event.key == mllog.EVAL_STOP and start:
            yield start, event
            start = None


def eval_times_s(events: Iterable[Event]) -> list[float]:
    """Return the seconds of each evaluation by the wall clock, without negative times."""
    times = [(stop.time_ms - start.time_ms) / 1000 for start, stop in evaluations(events)]
    return [time for time in times if time >= 0]


def steps_time_s(step_times_ms: Sequence[tuple[float, float]]) -> float | None:
    """Return the total seconds of all listed steps, given as (samples, milliseconds)."""
    return sum(time_ms for _, time_ms in step_times_ms) / 1000 if step_times_ms else None


def epoch_times_s(log: Log, step_times_ms: Sequence[tuple[float, float]]) -> tuple[float, ...]:
    """Return the seconds of each epoch whose steps are all listed; empty for random data, which has no epochs.

    An epoch is a pass over the training rows, without its incomplete last batch.
    """
    gbs, rows = log.integer(mllog.GLOBAL_BATCH_SIZE), log.integer(mllog.TRAIN_SAMPLES)
    if not gbs or not rows or gbs < 1 or rows < gbs or log.has_random_rows:
        return ()
    by_step = {round(samples / gbs): time_ms for samples, time_ms in step_times_ms}
    length = rows // gbs
    epochs = [range(first + 1, first + length + 1) for first in range(0, max(by_step, default=0), length)]
    complete = (epoch for epoch in epochs if all(step in by_step for step in epoch))
    return tuple(sum(by_step[step] for step in epoch) / 1000 for epoch in complete)


def real_token_share(log: Log) -> float | None:
    """Return the share of the tokens of all steps that is not padding; None if the log does not count it."""
    gbs, length = log.integer(mllog.GLOBAL_BATCH_SIZE), number(log.value("max_sequence_length"))
    real, steps = 0.0, 0
    for event in log.all(mllog.TRACKED_STATS):
        count = number(event.value.get(mllog.REAL_TOKENS)) if isinstance(event.value, dict) else None
        if count is not None:
            real, steps = real + count, steps + len(listed_s(event))
    every = steps * gbs * length if gbs and length else 0
    return real / every if 0 < real <= every else None


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a measured quantity, in the unit of its field."""

    median: float
    p10: float
    p90: float
    mean: float
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Return the distribution of values; None without values."""
    if not values:
        return None
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return Spread(median(values), tenths[0], tenths[8], fmean(values), len(values))


def times(log: Log, trial: Log) -> dict[str, Any]:
    """Return the fields for the times of steps and evaluations."""
    gbs, eval_times = log.integer(mllog.GLOBAL_BATCH_SIZE), eval_times_s(trial.events)
    timed = [stretch for _, stretch in trial.stretches if stretch.time_ms > 0]
    between_lines = tuple((s.samples, s.time_ms * gbs / s.trained) for s in timed) if gbs and gbs > 0 else ()
    listed = tuple(step_times_ms(trial))
    step_times = listed or between_lines
    tracked_ms = _tracked(trial, "train_step_time", scale=1000)
    return {
        "step_time_ms": spread([time_ms for _, time_ms in step_times] or tracked_ms),
        "step_times_ms": step_times,
        "eval_time_s": _median(eval_times),
        "eval_times_s": tuple(eval_times),
        "steps_time_s": steps_time_s(listed),
        "epoch_times_s": epoch_times_s(log, listed),
        "real_token_share": real_token_share(trial),
    }


def rates(log: Log, trial: Log, system: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for throughput and values derived from it."""
    throughput = _throughput([stretch for _, stretch in trial.stretches]) or _median(_tracked(trial, "throughput"))
    conflict = gpu_count.conflict(log, system)
    num_gpus = gpu_count.num_gpus(log, {} if conflict else system)
    per_gpu = throughput / num_gpus if throughput and num_gpus else None
    tokens = sequence_length(log)
    tflop_per_sample, tflops_gpu, mfu = _flops(log, per_gpu)
    return {
        "throughput_samples_s": throughput,
        "num_gpus": num_gpus,
        "gpu_count_conflict": conflict,
        "tokens_s_gpu": per_gpu * tokens if per_gpu and tokens else None,
        "tflop_per_sample": tflop_per_sample,
        "tflops_gpu": tflops_gpu,
        "mfu": mfu,
    }


def _throughput(training: Sequence[Stretch]) -> float | None:
    time_ms = sum(stretch.time_ms for stretch in training)
    return sum(stretch.trained for stretch in training) / time_ms * 1000 if time_ms > 0 else None


def _tracked(log: Log, name: str, *, scale: float = 1) -> list[float]:
    """Return a statistic from tracked_stats; used if no record counts samples."""
    stats = (event.value.get(name) for event in log.all(mllog.TRACKED_STATS) if isinstance(event.value, dict))
    return [value * scale for value in stats if is_number(value) and value > 0]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _flops(log: Log, samples_s_gpu: float | None) -> tuple[float | None, float | None, float | None]:
    """Return the TFLOP of a sample, TFLOP/s per GPU and MFU, each None if the log does not have it."""
    work, peak = number(log.value(mllog.MODEL_TFLOP_PER_SAMPLE)), number(log.value(mllog.ACCELERATOR_PEAK_TFLOPS))
    rate = samples_s_gpu * work if samples_s_gpu and work else None
    return work, rate, rate / peak if rate and peak and peak > 0 else None


def sequence_length(log: Log) -> float | None:
    """Return the tokens of a sample; None if neither the log nor its benchmark has it."""
    logged = number(log.value("max_sequence_length"))
    known = log.benchmark.sequence_length if log.benchmark else None
    return logged if logged and logged > 0 else known
