"""Check the pace in logs that are not ours: training or evaluations far from the median, and time that is neither.

Steps are timed between records that count samples. An unusual pace has many possible reasons, so it is only a warning.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from bench.contract import mllog
from bench.mlperf.log import Log, Stretch, finding
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
ALL_SAMPLES = 0.9
"""Time outside training and evaluation is only computed if the timed training covers this share of the samples."""


EventStretch = tuple[Event, Stretch | None]
"""A record, and the training period that it ends, if it ends one."""


def _check_pace(log: Log) -> Iterator[Finding]:
    """Yield times that differ much from the usual pace of a run: training, evaluations, or other time."""
    if log.is_ours or not log.run or (run_s := measured_s(log)) is None:
        return
    ended, keys = {id(event): stretch for event, stretch in log.stretches}, (mllog.TRACKED_STATS, mllog.EVAL_ACCURACY)
    followed = [(e, ended.get(id(e))) for e in log.run if id(e) in ended or e.key in keys]
    training, evaluated = [stretch for _, stretch in followed if stretch], evaluations(log)
    yield from _odd_training(log, training, run_s)
    yield from _contradicted(followed)
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
            what = f"training on {stretch.trained:,.0f} samples, up to {stretch.samples:,.0f}, took {took_s:,.1f} s"
            yield finding("LOG-20", "warning", line, f"{what}; the median in this log is {usual_s:,.1f} s")
            return


def _contradicted(followed: Iterable[EventStretch]) -> Iterator[Finding]:
    """Yield a block of training whose throughput, as logged by the run itself, contradicts its time_ms.

    Time multiplied by throughput must be the same for all blocks, in any unit. The first block is excluded: some logs
    measure only a part of it.
    """
    blocks = list(_tracked_blocks(followed))[1:]
    if len(blocks) < FEWEST:
        return
    unit = median(took_s * rate for took_s, rate, _ in blocks)
    for took_s, rate, line in blocks:
        if abs(took_s - unit / rate) > max(DEVIATION_S, DEVIATION * unit / rate):
            took = f"a block of training took {took_s:,.1f} s by time_ms"
            message = f"{took}, but {unit / rate:,.1f} s by its logged throughput"
            yield finding("LOG-20", "warning", line, message)
            return


def _tracked_blocks(followed: Iterable[EventStretch]) -> Iterator[tuple[float, float, int]]:
    """Yield (seconds by time_ms, blocks per unit of time by its tracked throughput, line) of each block of training."""
    trained, took_ms, rate = 0.0, 0.0, None
    for event, stretch in followed:
        if stretch:
            trained, took_ms = trained + stretch.trained, took_ms + stretch.time_ms
        rate = _tracked_rate(event) or rate
        if event.key == mllog.EVAL_ACCURACY:
            if rate and took_ms > 0 and (blocks_per_time := rate / trained) > 0:
                yield took_ms / 1000, blocks_per_time, event.line
            trained, took_ms, rate = 0.0, 0.0, None


def _tracked_rate(event: Event) -> float | None:
    """Return the throughput in a record, or the inverse of the step time, in any unit."""
    value = event.value if event.key == mllog.TRACKED_STATS and isinstance(event.value, dict) else {}
    throughput, step_time = value.get("throughput"), value.get("train_step_time")
    if is_number(throughput) and throughput > 0:
        return throughput
    return 1 / step_time if is_number(step_time) and step_time > 0 else None


def _odd_evaluations(evaluated: Sequence[Timed], run_s: float) -> Iterator[Finding]:
    if len(evaluated) < FEWEST:
        return
    usual_s = median(one.time_s for one in evaluated)
    for one in evaluated:
        if _is_far_off(one.time_s, usual_s, run_s):
            took = f"evaluation {one.number:,} took {one.time_s:,.1f} s"
            message = f"{took}; the median in this log is {usual_s:,.1f} s"
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
            passed = f"{longest_s:,.1f} s passed before this {after.key:.40}"
            message = f"{passed}; the next longest time in this log is {usual_s:,.1f} s"
            yield finding("LOG-20", "warning", after.line, message)
            return


def _is_far_off(took_s: float, usual_s: float, run_s: float) -> bool:
    """Return whether a time is far above the median (by a factor or by a share of the run) or far below it."""
    over_s = took_s - usual_s
    is_slow = took_s > MANY_TIMES * usual_s or (took_s > 2 * usual_s and over_s > MIN_EXCESS * run_s)
    is_fast = took_s < FEW_TIMES * usual_s and -over_s > FASTER_S
    return is_fast or (is_slow and over_s > MIN_EXCESS_S)


CHECKS = (_check_pace,)
