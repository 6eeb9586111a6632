"""Judge whether steps and evaluations explain the time of a run, and name the ones that took many times the usual.

A log of ours lists the time of every step, by the device's clock. In a log of somebody else steps are timed between
records that count samples, so that a run is compared with its own median, and only warned of.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median, median_low
from typing import NamedTuple

from bench.contract import mllog
from bench.mlperf.clock_checks import is_ours, until_run_stop
from bench.mlperf.intervals import Stretch, stretches
from bench.mlperf.log import Log, finding
from bench.mlperf.reader import Event, is_number
from bench.rules.finding import Finding

FEWEST = 3
"""Times whose median says what is usual."""
MANY_TIMES = 10
"""How many times the median a step or an evaluation must take to be named. 74 published logs reach 5.1 times (means of
ten steps) and 6.8 times (an evaluation of 0.5 s)."""
STALL_S = 5.0
"""How far above the median a step of ours must be, too: steps of 0.05 s are 0.15 s long where a CPU has other work."""
GAP_S, GAP = 60.0, 0.25
"""What is named in a log of somebody else is longer than this above the usual, and takes such a share of the run."""
ALL_SAMPLES = 0.9
FEW_TIMES = 0.5
"""Somebody else's stretch of training that is faster than this is named; the fastest in 74 published logs has 0.93."""
TOO_SHORT_S, TOO_SHORT = 1.0, 0.01
"""By how much the listed steps may take longer than the interval that holds them: seconds, and a share of it."""
TOO_LONG_S, TOO_LONG = 10.0, 0.1
"""The same the other way round: the host's work between steps is not part of them."""


class Timed(NamedTuple):
    """One step or evaluation."""

    number: int
    time_s: float
    line: int


class Block(NamedTuple):
    """A block of training up to the last record in it that lists step times."""

    time_s: float
    steps_s: float
    start: Event
    end: Event

    @property
    def unexplained_s(self) -> float:
        return self.time_s - self.steps_s


def _check_stalls(log: Log) -> Iterator[Finding]:
    """Yield the steps, and the evaluations, of a run of ours that took many times their median."""
    if not is_ours(log) or not until_run_stop(log):
        return
    run_s = _run_s(log)
    for what, timed in (("step", list(_steps(log).values())), ("evaluation", _evaluations(log))):
        usual_s = median_low(one.time_s for one in timed) if len(timed) >= FEWEST else None
        if usual_s is None:
            continue
        slow = [one for one in timed if one.time_s > MANY_TIMES * usual_s and one.time_s - usual_s > STALL_S]
        if slow:
            yield finding("RUN-18", "warning", slow[0].line, _stalled(what, slow, usual_s, run_s))


def _stalled(what: str, slow: Sequence[Timed], usual_s: float, run_s: float | None) -> str:
    """Return which one took longest, and which part of the run all that took many times the median are."""
    worst = max(slow, key=lambda one: one.time_s)
    took = f"{what} {worst.number:,} took {worst.time_s:,.1f} s (median {usual_s:,.3g} s)"
    more = f", and {len(slow) - 1} more took many times the median" if slow[1:] else ""
    total_s = sum(one.time_s for one in slow)
    share = f": {total_s / run_s:.0%} of the measured {run_s:,.1f} s" if run_s else ""
    return took + more + share


def _run_s(log: Log) -> float | None:
    start, stop = log.single(mllog.RUN_START), log.single(mllog.RUN_STOP)
    return (stop.time_ms - start.time_ms) / 1000 if start and stop and stop.time_ms > start.time_ms else None


def _steps(log: Log) -> dict[int, Timed]:
    """Return the steps that the log lists, by their number."""
    found: dict[int, Timed] = {}
    for event in log.all(mllog.TRACKED_STATS):
        listed, last = _listed(event), _step(log, event)
        if last is not None:
            first = last - len(listed) + 1
            found |= {n: Timed(n, time_s, event.line) for n, time_s in enumerate(listed, first)}
    return found


def _listed(event: Event) -> list[float]:
    """Return the step times of a record; empty if it lists none, or not only numbers."""
    listed = event.value.get(mllog.STEP_TIMES) if isinstance(event.value, dict) else None
    return listed if isinstance(listed, list) and all(is_number(one) and one >= 0 for one in listed) else []


def _step(log: Log, event: Event) -> int | None:
    """Return how many steps have been made at a record, by its samples."""
    samples, gbs = event.metadata.get("samples_count"), log.integer(mllog.GLOBAL_BATCH_SIZE)
    return int(samples // gbs) if is_number(samples) and gbs and gbs > 0 and samples >= 0 else None


def _evaluations(log: Log) -> list[Timed]:
    found: list[Timed] = []
    since: Event | None = None
    for event in until_run_stop(log, mllog.RUN_START):
        if event.key == mllog.EVAL_START:
            since = event
        elif event.key == mllog.EVAL_STOP and since:
            found.append(Timed(len(found) + 1, (event.time_ms - since.time_ms) / 1000, since.line))
            since = None
    return found


def _check_step_sum(log: Log) -> Iterator[Finding]:
    """Yield that the steps of a run of ours do not take as long as the blocks of training that hold them."""
    if not is_ours(log):
        return
    blocks = list(_blocks(log))
    time_s, steps_s = sum(block.time_s for block in blocks), sum(block.steps_s for block in blocks)
    if -TOO_SHORT_S - TOO_SHORT * steps_s <= time_s - steps_s <= TOO_LONG_S + TOO_LONG * time_s:
        return
    worst = max(blocks, key=lambda block: abs(block.unexplained_s))
    where = f"most of the difference between lines {worst.start.line} and {worst.end.line}"
    message = f"by time_ms, training took {time_s:,.1f} s, and its steps add up to {steps_s:,.1f} s: {where}"
    yield finding("LOG-20", "error", worst.end.line, message)


def _blocks(log: Log) -> Iterator[Block]:
    """Yield the blocks whose steps are all listed. Records in between have waited for the device, as evaluations do."""
    steps = _steps(log)
    start: Event | None = None
    end: Event | None = None
    for event in until_run_stop(log, mllog.RUN_START):
        if event.key == mllog.BLOCK_START:
            start, end = event, None
        elif event.key == mllog.TRACKED_STATS and _listed(event):
            end = event
        elif event.key in (mllog.BLOCK_STOP, mllog.RUN_STOP) and start and end:
            first, last = _step(log, start), _step(log, end)
            numbers = range(first + 1, last + 1) if first is not None and last is not None else range(0)
            if numbers and all(number in steps for number in numbers):
                steps_s = sum(steps[number].time_s for number in numbers)
                yield Block((end.time_ms - start.time_ms) / 1000, steps_s, start, end)
            start = end = None


def _check_pace(log: Log) -> Iterator[Finding]:
    """Yield what is far from the pace of somebody else's run: training, evaluations, or time that is neither."""
    if is_ours(log) or not until_run_stop(log) or (run_s := _run_s(log)) is None:
        return
    training, evaluations = list(stretches(log.events)), _evaluations(log)
    yield from _odd_training(log, training, run_s)
    if log.benchmark and log.benchmark.evaluates_afterwards:
        return
    yield from _odd_evaluations(evaluations, run_s)
    if _is_all_timed(log, training, evaluations):
        yield from _neither(training, evaluations, run_s)
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
            yield finding("LOG-20", "warning", line, f"{what}, where {usual_s:,.1f} s are usual in this log")
            return


def _odd_evaluations(evaluations: Sequence[Timed], run_s: float) -> Iterator[Finding]:
    if len(evaluations) < FEWEST:
        return
    usual_s = median(one.time_s for one in evaluations)
    for one in evaluations:
        if _is_far_off(one.time_s, usual_s, run_s):
            message = (
                f"evaluation {one.number:,} took {one.time_s:,.1f} s, where {usual_s:,.1f} s are usual in this log"
            )
            yield finding("LOG-20", "warning", one.line, message)
            return


def _is_all_timed(log: Log, training: Sequence[Stretch], evaluations: Sequence[Timed]) -> bool:
    """Return whether the log has times for all training and all evaluations."""
    at = [samples for event in log.evaluations if (samples := log.samples(event)) is not None]
    trained = sum(stretch.trained for stretch in training)
    return 0 < len(log.all(mllog.EVAL_ACCURACY)) == len(at) == len(evaluations) and trained >= ALL_SAMPLES * max(at)


def _neither(training: Sequence[Stretch], evaluations: Sequence[Timed], run_s: float) -> Iterator[Finding]:
    """Yield the time that is neither training nor evaluation."""
    other_s = run_s - sum(one.time_s for one in evaluations) - sum(stretch.time_ms for stretch in training) / 1000
    if other_s > max(GAP_S, GAP * run_s):
        message = f"{other_s:,.1f} s of the measured {run_s:,.1f} s are neither training nor evaluation"
        yield finding("LOG-20", "warning", None, message)


def _odd_gaps(log: Log, run_s: float) -> Iterator[Finding]:
    """Yield the gap between two records that is far above all others between records of these two keys.

    The first block of training is left out: by the schedules of most benchmarks it is longer than the others.
    """
    gaps: dict[tuple[str, str], list[tuple[float, Event]]] = defaultdict(list)
    first_block = log.all(mllog.BLOCK_START)[:1] or log.all("epoch_start")[:1]
    for before, after in pairwise(until_run_stop(log, mllog.RUN_START)):
        if before not in first_block:
            gaps[before.key, after.key].append(((after.time_ms - before.time_ms) / 1000, after))
    for found in gaps.values():
        (longest_s, after), *others = sorted(found, key=lambda gap: -gap[0])
        if len(others) < FEWEST:
            continue
        usual_s = others[0][0]
        if longest_s > MANY_TIMES * usual_s and longest_s - usual_s > max(GAP_S, GAP * run_s):
            message = (
                f"{longest_s:,.1f} s pass before {after.key}, where at most {usual_s:,.1f} s are usual in this log"
            )
            yield finding("LOG-20", "warning", after.line, message)
            return


def _is_far_off(took_s: float, usual_s: float, run_s: float) -> bool:
    """Return whether a time is far above the usual, by many times or by a large part of the run, or far below it."""
    over_s = took_s - usual_s
    is_slow = took_s > MANY_TIMES * usual_s or (took_s > 2 * usual_s and over_s > GAP * run_s)
    is_fast = took_s < FEW_TIMES * usual_s and -over_s > TOO_LONG_S
    return is_fast or (is_slow and over_s > GAP_S)


CHECKS = (_check_stalls, _check_step_sum, _check_pace)
