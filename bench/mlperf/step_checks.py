"""Judge the steps and evaluations of a run of ours: whether they explain its time, and which took many times the usual.

Our logs list the time of every step, by the device's clock. Other times are taken from the monotonic clock, where the
log has one: `bench.mlperf.clock_checks` judges the wall clock.
"""

from collections.abc import Iterator, Sequence
from statistics import median_low
from typing import NamedTuple

from bench.contract import mllog
from bench.mlperf import local_sgd, speed
from bench.mlperf.log import Log, finding, number
from bench.mlperf.reader import Event, is_number
from bench.rules.finding import Finding

FEWEST = 3
"""Times whose median says what is usual."""
MANY_TIMES = 10
"""How many times the median a step or an evaluation must take to be named. 74 published logs reach 5.1 times (means of
ten steps) and 6.8 times (an evaluation of 0.5 s)."""
STALL_S = 10.0
"""How far above the median it must be, too. 320 steps of the tiny task on two CPUs with a load of 60 took up to 5.8 s,
7.6 times their median."""
TOO_SHORT_S, TOO_SHORT = 1.0, 0.01
"""By how much the listed steps may take longer than the time that holds them: seconds, and a share of it."""
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


def _check_stalls(log: Log) -> Iterator[Finding]:
    """Yield the steps, and the evaluations, of a run of ours that took many times their median."""
    if not log.is_ours or not log.run:
        return
    run_s = measured_s(log)
    for what, timed in (("step", _steps_alone(log)), ("evaluation", evaluations(log))):
        usual_s = median_low(one.time_s for one in timed) if len(timed) >= FEWEST else None
        if usual_s is None:
            continue
        slow = [one for one in timed if one.time_s > MANY_TIMES * usual_s and one.time_s - usual_s > STALL_S]
        if slow:
            yield finding("RUN-18", "warning", *_stalled(what, slow, usual_s, run_s))


def _stalled(what: str, slow: Sequence[Timed], usual_s: float, run_s: float | None) -> tuple[int, str]:
    """Return the line of the longest, how long it took, and which part of the run all of these are."""
    worst = max(slow, key=lambda one: one.time_s)
    took = f"{what} {worst.number:,} took {worst.time_s:,.1f} s (median {usual_s:,.3g} s)"
    more = f", and {len(slow) - 1} more took many times the median" if slow[1:] else ""
    total_s = sum(one.time_s for one in slow)
    share = f": {total_s / run_s:.0%} of the measured {run_s:,.1f} s" if run_s else ""
    return worst.line, took + more + share


def measured_s(log: Log) -> float | None:
    """Return the seconds from run_start to run_stop; None if either is missing or none have passed."""
    start, stop = log.single(mllog.RUN_START), log.single(mllog.RUN_STOP)
    return time_s if start and stop and (time_s := elapsed_s(start, stop)) > 0 else None


def elapsed_s(before: Event, after: Event) -> float:
    """Return the seconds between two records, by the monotonic clock if both have it."""
    times = [number(event.metadata.get(mllog.MONOTONIC_MS)) for event in (before, after)]
    if times[0] is not None and times[1] is not None:
        return (times[1] - times[0]) / 1000
    return (after.time_ms - before.time_ms) / 1000


def _steps(log: Log) -> dict[int, Timed]:
    """Return the steps that the log lists, by their number."""
    found: dict[int, Timed] = {}
    for event in log.all(mllog.TRACKED_STATS):
        listed, last = _listed(event), _step(log, event)
        if last is not None:
            first = last - len(listed) + 1
            found |= {n: Timed(n, time_s, event.line) for n, time_s in enumerate(listed, first)}
    return found


def _steps_alone(log: Log) -> list[Timed]:
    """Return the steps without the merges of groups that train apart, which may take as long as they like."""
    stopped_s = local_sgd.stopped_s(log)
    return [one._replace(time_s=one.time_s - stopped_s.get(one.number, 0.0)) for one in _steps(log).values()]


def _listed(event: Event) -> list[float]:
    """Return the step times of a record; empty if it lists none, or not only times."""
    listed = speed.listed_s(event)
    return listed if all(time_s >= 0 for time_s in listed) else []


def _step(log: Log, event: Event) -> int | None:
    """Return how many steps have been made at a record, by its samples."""
    samples, gbs = event.metadata.get("samples_count"), log.integer(mllog.GLOBAL_BATCH_SIZE)
    return int(samples // gbs) if is_number(samples) and gbs and gbs > 0 and samples >= 0 else None


def evaluations(log: Log) -> list[Timed]:
    """Return the time of each evaluation of the run, from eval_start to eval_stop, at the line of the former."""
    found = enumerate(speed.evaluations(log.run), 1)
    return [Timed(n, elapsed_s(start, stop), start.line) for n, (start, stop) in found]


def _check_step_sum(log: Log) -> Iterator[Finding]:
    """Yield that the steps of a run of ours do not take as long as the blocks of training that hold them."""
    if not log.is_ours:
        return
    blocks = list(_blocks(log))
    time_s, steps_s = sum(block.time_s for block in blocks), sum(block.steps_s for block in blocks)
    if -TOO_SHORT_S - TOO_SHORT * steps_s <= time_s - steps_s <= TOO_LONG_S + TOO_LONG * time_s:
        return
    worst = max(blocks, key=lambda block: abs(block.time_s - block.steps_s))
    where = f"most of the difference between lines {worst.start.line} and {worst.end.line}"
    message = f"training took {time_s:,.1f} s, and its steps add up to {steps_s:,.1f} s; {where}"
    yield finding("LOG-20", "error", worst.end.line, message)


def _blocks(log: Log) -> Iterator[Block]:
    """Yield the blocks whose steps are all listed. Records in between have waited for the device, as evaluations do."""
    steps = _steps(log)
    start: Event | None = None
    end: Event | None = None
    for event in log.run:
        if event.key == mllog.BLOCK_START:
            start, end = event, None
        elif event.key == mllog.TRACKED_STATS and _listed(event):
            end = event
        elif event.key in (mllog.BLOCK_STOP, mllog.RUN_STOP) and start and end:
            first, last = _step(log, start), _step(log, end)
            numbers = range(first + 1, last + 1) if first is not None and last is not None else range(0)
            if numbers and all(number in steps for number in numbers):
                steps_s = sum(steps[number].time_s for number in numbers)
                yield Block(elapsed_s(start, end), steps_s, start, end)
            start = end = None


CHECKS = (_check_stalls, _check_step_sum)
