"""Check the pace in logs that are not ours: by its own median, and by the speed that the run itself measured.

Steps are timed between records that count samples. An unusual pace has many possible reasons, so it is only a warning.
Times that are shorter than the run's own measurements allow are an error: nothing but changed times makes them so.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from bench.contract import mllog
from bench.mlperf.log import Log, Stretch, finding, number
from bench.mlperf.reader import Event, is_number
from bench.mlperf.step_checks import FEWEST, MANY_TIMES, Timed, evaluations, measured_s
from bench.rules.finding import Finding

MIN_EXCESS_S, MIN_EXCESS = 60.0, 0.25
"""A time is reported when it exceeds the median by this many seconds and is either MANY_TIMES the median or exceeds it
by this share of the run."""
FEW_TIMES, FASTER_S = 0.5, 10.0
"""Training is reported when it takes less than this share of the median time and saves this many seconds. In 74
published logs the smallest share is 0.93."""
DEVIATION_S, DEVIATION = 5.0, 0.05
"""How far the time of a block may differ from the time by its own throughput; 74 published logs agree within 1.3 %."""
FASTER, FASTER_ROUGHLY, FASTER_RUN = 0.03, 0.1, 0.2
"""By which share a time by the run's own measurements may exceed the time by time_ms: of blocks of training; of
evaluations, and of blocks of benchmarks that evaluate after the run; and of whole runs that count epochs. The largest
shares in published logs are 0.004, 0.073 and 0.143. A longer time has no limit: the run's own speed excludes pauses."""
ALL_SAMPLES = 0.9
"""Time outside training and evaluation is only computed if the timed training covers this share of the samples."""


EventStretch = tuple[Event, Stretch | None]
"""A record, and the training period that it ends, if it ends one."""


class TrackedBlock(NamedTuple):
    """A block of training, timed by time_ms and by the speed that the run tracked."""

    time_s: float
    own_s: float
    """By the median speed in the block."""
    last_s: float
    """By the last speed in the block."""
    line: int


def _check_pace(log: Log) -> Iterator[Finding]:
    """Yield times that differ much from the usual pace of a run: training, evaluations, or other time."""
    if log.is_ours or not log.run or (run_s := measured_s(log)) is None:
        return
    ended, keys = {id(event): stretch for event, stretch in log.stretches}, (mllog.TRACKED_STATS, mllog.EVAL_ACCURACY)
    followed = [(e, ended.get(id(e))) for e in log.run if id(e) in ended or e.key in keys]
    training, evaluated = [stretch for _, stretch in followed if stretch], evaluations(log)
    blocks = list(_tracked_blocks(log, followed))
    yield from _odd_training(log, training, run_s)
    yield from _contradicted(blocks[1:])
    yield from _scaled(log, blocks, evaluated, run_s)
    if log.benchmark and log.benchmark.evaluates_afterwards:
        return
    yield from _odd_evaluations(evaluated, run_s)
    if _is_all_timed(log, training, evaluated):
        yield from _neither(training, evaluated, run_s)
    else:
        yield from _odd_gaps(log, run_s)


def _odd_training(log: Log, training: Sequence[Stretch], run_s: float) -> Iterator[Finding]:
    if len(training) < FEWEST:
        return
    usual = median(stretch.time_ms / stretch.trained for stretch in training)
    for stretch in training:
        took_s, usual_s = stretch.time_ms / 1000, usual * stretch.trained / 1000
        if _is_far_off(took_s, usual_s, run_s):
            line = next((e.line for e in log.events if e.metadata.get("samples_count") == stretch.samples), None)
            what = (
                f"training on {stretch.trained:,.0f} samples (until sample {stretch.samples:,.0f}) took {took_s:,.1f} s"
            )
            yield finding(
                "LOG-20", "warning", line, f"{what}; at the median speed of this log it would take {usual_s:,.1f} s"
            )
            return


def _contradicted(blocks: Sequence[TrackedBlock]) -> Iterator[Finding]:
    """Yield a block of training whose throughput, as logged by the run itself, contradicts its time_ms.

    The ratio of the two times must be the same for all blocks but the first: some logs measure only a part of that one.
    """
    if len(blocks) < FEWEST:
        return
    usual = median(block.time_s / block.last_s for block in blocks)
    for block in blocks:
        own_s = usual * block.last_s
        if abs(block.time_s - own_s) > max(DEVIATION_S, DEVIATION * own_s):
            took = f"a block of training took {block.time_s:,.1f} s according to time_ms"
            yield finding(
                "LOG-20", "warning", block.line, f"{took}, but {own_s:,.1f} s according to its logged throughput"
            )
            return


def _scaled(log: Log, blocks: Sequence[TrackedBlock], evaluated: Sequence[Timed], run_s: float) -> Iterator[Finding]:
    """Yield that the times of the log are too short for the speed that the run itself measured."""
    afterwards = log.benchmark is not None and log.benchmark.evaluates_afterwards
    timed = [(block.time_s, block.own_s) for block in blocks[1:] or blocks] or list(_tracked_steps(log))
    usual = median(own_s / time_s for time_s, own_s in timed) if timed else 1.0
    own_s = [value for event in log.all(mllog.TRACKED_STATS) if (value := _tracked(event, "validation_time"))]
    usual_s = median(one.time_s for one in evaluated) if evaluated and own_s else 0.0
    if usual > 1 + (FASTER_ROUGHLY if afterwards else FASTER):
        what = f"training took only {1 / usual:.0%} of the time that follows from the logged throughput"
        yield finding("LOG-22", "error", None, what)
    elif usual_s > 0 and median(own_s) > (1 + FASTER_ROUGHLY) * usual_s:
        what = f"evaluations took {usual_s:,.1f} s according to time_ms, but {median(own_s):,.1f} s in validation_time"
        yield finding("LOG-22", "error", evaluated[0].line, what)
    elif not timed:
        yield from _scaled_run(log, run_s)


def _tracked_steps(log: Log) -> Iterator[tuple[float, float]]:
    """Yield (seconds by time_ms, tracked step time) of one or more steps between two records that track it."""
    tracked = [(e, own_s) for e in log.all(mllog.TRACKED_STATS) if (own_s := _tracked(e, "train_step_time"))]
    for (before, _), (after, own_s) in pairwise(tracked):
        first, last = (number(event.metadata.get("step")) for event in (before, after))
        time_s = (after.time_ms - before.time_ms) / 1000
        if first is not None and last is not None and last > first and time_s > 0:
            yield time_s, own_s


def _scaled_run(log: Log, run_s: float) -> Iterator[Finding]:
    """Yield that a run whose records count epochs, or samples as epochs, is shorter than its own throughput allows."""
    rates = [rate for event in log.all(mllog.TRACKED_STATS) if (rate := _tracked(event, "throughput"))]
    ends = [end for e in log.evaluations if (end := number(e.metadata.get("epoch_num"))) is not None and end > 0]
    if log.stretches or not (rates and ends) or log.benchmark is None or log.benchmark.train_samples_is_batches:
        return
    per_epoch = number(log.value(mllog.TRAIN_SAMPLES))
    units = [1.0, per_epoch] if per_epoch and per_epoch > 0 else [1.0]
    times_s = [max(ends) * unit / median(rates) for unit in units]
    own_s = min(times_s, key=lambda time_s: abs(math.log(time_s / run_s)))
    if own_s > (1 + FASTER_RUN) * run_s:
        what = (
            f"the run took {run_s:,.1f} s according to time_ms, but {own_s:,.1f} s according to its logged throughput"
        )
        yield finding("LOG-22", "error", None, what)


def _tracked_blocks(log: Log, followed: Iterable[EventStretch]) -> Iterator[TrackedBlock]:
    """Yield each block of training with a tracked speed."""
    trained, took_ms, gbs = 0.0, 0.0, log.integer(mllog.GLOBAL_BATCH_SIZE)
    rates: list[float] = []
    for event, stretch in followed:
        if stretch:
            trained, took_ms = trained + stretch.trained, took_ms + stretch.time_ms
        if rate := _tracked_rate(event, gbs):
            rates.append(rate)
        if event.key == mllog.EVAL_ACCURACY:
            if rates and took_ms > 0:
                yield TrackedBlock(took_ms / 1000, trained / median(rates), trained / rates[-1], event.line)
            trained, took_ms, rates = 0.0, 0.0, []


def _tracked_rate(event: Event, gbs: int | None) -> float | None:
    """Return the samples/s in a record: its throughput, else of its step time."""
    step_time = _tracked(event, "train_step_time")
    return _tracked(event, "throughput") or (gbs / step_time if step_time and gbs and gbs > 0 else None)


def _tracked(event: Event, name: str) -> float | None:
    """Return a positive number that a run tracked of itself; None if the record does not have it."""
    value = event.value.get(name) if event.key == mllog.TRACKED_STATS and isinstance(event.value, dict) else None
    return value if is_number(value) and value > 0 else None


def _odd_evaluations(evaluated: Sequence[Timed], run_s: float) -> Iterator[Finding]:
    if len(evaluated) < FEWEST:
        return
    usual_s = median(one.time_s for one in evaluated)
    for one in evaluated:
        if _is_far_off(one.time_s, usual_s, run_s):
            took = f"evaluation {one.number:,} took {one.time_s:,.1f} s"
            message = f"{took}, but the median of all evaluations is {usual_s:,.1f} s"
            yield finding("LOG-20", "warning", one.line, message)
            return


def _is_all_timed(log: Log, training: Sequence[Stretch], evaluated: Sequence[Timed]) -> bool:
    """Return whether the log has times for all training and all evaluations."""
    at = [samples for event in log.evaluations if (samples := log.samples(event)) is not None]
    trained = sum(stretch.trained for stretch in training)
    return 0 < len(log.all(mllog.EVAL_ACCURACY)) == len(at) == len(evaluated) and trained >= ALL_SAMPLES * max(at)


def _neither(training: Sequence[Stretch], evaluated: Sequence[Timed], run_s: float) -> Iterator[Finding]:
    """Yield the time that is neither training nor evaluation."""
    other_s = run_s - sum(one.time_s for one in evaluated) - sum(stretch.time_ms for stretch in training) / 1000
    if other_s > max(MIN_EXCESS_S, MIN_EXCESS * run_s):
        message = (
            f"{other_s:,.1f} s of {run_s:,.1f} s between run_start and run_stop are neither training nor evaluation"
        )
        yield finding("LOG-20", "warning", None, message)


def _odd_gaps(log: Log, run_s: float) -> Iterator[Finding]:
    """Yield a gap between two records that is much longer than all others between records of these two keys.

    The first block of training is excluded: by the schedules of most benchmarks it is longer than the others.
    """
    gaps: dict[tuple[str, str], list[tuple[float, Event]]] = defaultdict(list)
    first_block = log.all(mllog.BLOCK_START)[:1] or log.all("epoch_start")[:1]
    for before, after in pairwise(log.run):
        if before not in first_block:
            gaps[before.key, after.key].append(((after.time_ms - before.time_ms) / 1000, after))
    for pairs in gaps.values():
        (longest_s, after), *others = sorted(pairs, key=lambda gap: -gap[0])
        if len(others) < FEWEST:
            continue
        usual_s = others[0][0]
        if longest_s > MANY_TIMES * usual_s and longest_s - usual_s > max(MIN_EXCESS_S, MIN_EXCESS * run_s):
            passed = f"the log has no record in the {longest_s:,.1f} s before this {after.key:.40}"
            message = f"{passed}; the second longest pause is {usual_s:,.1f} s"
            yield finding("LOG-20", "warning", after.line, message)
            return


def _is_far_off(took_s: float, usual_s: float, run_s: float) -> bool:
    """Return whether a time is far above the median (by a factor or by a share of the run) or far below it."""
    over_s = took_s - usual_s
    is_slow = took_s > MANY_TIMES * usual_s or (took_s > 2 * usual_s and over_s > MIN_EXCESS * run_s)
    is_fast = took_s < FEW_TIMES * usual_s and -over_s > FASTER_S
    return is_fast or (is_slow and over_s > MIN_EXCESS_S)


CHECKS = (_check_pace,)
