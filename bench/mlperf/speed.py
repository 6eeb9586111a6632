"""Measure from the records of a log how fast a trial was: step times, evaluation times, throughput, MFU."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Any

from bench.contract import mllog
from bench.mlperf import epochs, gpu_count
from bench.mlperf.intervals import eval_times_s, step_times_ms
from bench.mlperf.log import Log, number
from bench.mlperf.pace import Stretch
from bench.mlperf.reader import is_number


@dataclass(frozen=True, slots=True)
class Spread:
    """How a measured quantity is distributed; units are those of the field that holds it."""

    median: float
    p10: float
    p90: float
    mean: float
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Return how values are distributed; None for none."""
    if not values:
        return None
    tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return Spread(median(values), tenths[0], tenths[8], fmean(values), len(values))


def times(log: Log, trial: Log) -> dict[str, Any]:
    """Return the fields that hold the times of steps and evaluations."""
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
        "steps_time_s": epochs.steps_time_s(listed),
        "epoch_times_s": epochs.epoch_times_s(log, listed),
        "real_token_share": epochs.real_token_share(trial),
    }


def rates(log: Log, trial: Log, system: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that hold throughput and what follows from it."""
    throughput = _throughput([stretch for _, stretch in trial.stretches]) or _median(_tracked(trial, "throughput"))
    doubt = gpu_count.doubt(log, system)
    num_gpus = gpu_count.num_gpus(log, {} if doubt else system)
    per_gpu = throughput / num_gpus if throughput and num_gpus else None
    tokens = sequence_length(log)
    tflop_per_sample, tflops_gpu, mfu = _flops(log, per_gpu)
    return {
        "throughput_samples_s": throughput,
        "num_gpus": num_gpus,
        "gpus_in_doubt": doubt,
        "tokens_s_gpu": per_gpu * tokens if per_gpu and tokens else None,
        "tflop_per_sample": tflop_per_sample,
        "tflops_gpu": tflops_gpu,
        "mfu": mfu,
    }


def _throughput(training: Sequence[Stretch]) -> float | None:
    time_ms = sum(stretch.time_ms for stretch in training)
    return sum(stretch.trained for stretch in training) / time_ms * 1000 if time_ms > 0 else None


def _tracked(log: Log, name: str, *, scale: float = 1) -> list[float]:
    """Return a statistic that the run itself tracked; used if no record counts samples."""
    stats = (event.value.get(name) for event in log.all(mllog.TRACKED_STATS) if isinstance(event.value, dict))
    return [value * scale for value in stats if is_number(value) and value > 0]


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _flops(log: Log, samples_s_gpu: float | None) -> tuple[float | None, float | None, float | None]:
    """Return the TFLOP of a sample, TFLOP/s per GPU and MFU, each None if the log does not give it."""
    work, peak = number(log.value(mllog.MODEL_TFLOP_PER_SAMPLE)), number(log.value(mllog.ACCELERATOR_PEAK_TFLOPS))
    rate = samples_s_gpu * work if samples_s_gpu and work else None
    return work, rate, rate / peak if rate and peak and peak > 0 else None


def sequence_length(log: Log) -> float | None:
    """Return the tokens of a sample; None if neither the log nor its benchmark says it."""
    logged = number(log.value("max_sequence_length"))
    known = log.benchmark.sequence_length if log.benchmark else None
    return logged if logged and logged > 0 else known
