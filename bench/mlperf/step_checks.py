"""Check the steps and evaluations of our own runs: their sum against the run time, and steps far above the median.

Our logs list the time of every step, by the device's clock. Other times are by the monotonic clock if the log has one.
`bench.mlperf.clock_checks` checks the wall clock.
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
"""The smallest number of times for which the median is used."""
MANY_TIMES = 10
"""A step or an evaluation is reported when it takes more than this many times the median. 74 published logs reach 5.1
times (means of ten steps) and 6.8 times (an evaluation of 0.5 s)."""
STALL_S = 10.0
"""And when it exceeds the median by this many seconds. 320 steps of the tiny task on two CPUs with a load of 60 took up
to 5.8 s, 7.6 times their median."""
TOO_SHORT_S, TOO_SHORT = 1.0, 0.01
"""By how much the sum of the listed steps may exceed the time of their block: seconds, and a share of it."""
TOO_LONG_S, TOO_LONG = 10.0, 0.1
"""By how much the time of the blocks may exceed the sum of their steps, which excludes host work between steps."""


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
    """Yield the steps and evaluations of our own run that took much longer than their median."""
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
    """Return the line of the longest, its time, and the share of the run of all of them."""
    worst = max(slow, key=lambda one: one.time_s)
    took = f"{what} {worst.number:,} took {worst.time_s:,.1f} s, but the median is {usual_s:,.3g} s"
    more = f", and {len(slow) - 1} more are much slower than the median" if slow[1:] else ""
    total_s = sum(one.time_s for one in slow)
    share = f"; in total {total_s / run_s:.0%} of the {run_s:,.1f} s between run_start and run_stop" if run_s else ""
    return worst.line, took + more + share


def measured_s(log: Log) -> float | None:
    """Return the seconds from run_start to run_stop; None if one is missing or the time is not positive."""
    start, stop = log.single(mllog.RUN_START), log.single(mllog.RUN_STOP)
    return time_s if start and stop and (time_s := elapsed_s(start, stop)) > 0 else None


def elapsed_s(before: Event, after: Event) -> float:
    """Return the seconds between two records, by the monotonic clock if both have it."""
    times = [number(event.metadata.get(mllog.MONOTONIC_MS)) for event in (before, after)]
    if times[0] is not None and times[1] is not None:
        return (times[1] - times[0]) / 1000
    return (after.time_ms - before.time_ms) / 1000


def _steps(log: Log) -> dict[int, Timed]:
    """Return the steps in the log, by number."""
    steps: dict[int, Timed] = {}
    for event in log.all(mllog.TRACKED_STATS):
        listed, last = _listed(event), _step(log, event)
        if last is not None:
            first = last - len(listed) + 1
            steps |= {n: Timed(n, time_s, event.line) for n, time_s in enumerate(listed, first)}
    return steps


def _steps_alone(log: Log) -> list[Timed]:
    """Return the step times without the time of weight averaging (local SGD), which has no limit here."""
    stopped_s = local_sgd.stopped_s(log)
    return [one._replace(time_s=one.time_s - stopped_s.get(one.number, 0.0)) for one in _steps(log).values()]


def _listed(event: Event) -> list[float]:
    """Return the step times in a record; empty if it has none, or not only times."""
    listed = speed.listed_s(event)
    return listed if all(time_s >= 0 for time_s in listed) else []


def _step(log: Log, event: Event) -> int | None:
    """Return the number of steps at a record, by its samples."""
    samples, gbs = event.metadata.get("samples_count"), log.integer(mllog.GLOBAL_BATCH_SIZE)
    return int(samples // gbs) if is_number(samples) and gbs and gbs > 0 and samples >= 0 else None


def evaluations(log: Log) -> list[Timed]:
    """Return the time of each evaluation of the run, from eval_start to eval_stop, with the line of eval_start."""
    pairs = enumerate(speed.evaluations(log.run), 1)
    return [Timed(n, elapsed_s(start, stop), start.line) for n, (start, stop) in pairs]


def _check_step_sum(log: Log) -> Iterator[Finding]:
    """Yield that the sum of the steps of our own run differs from the time of its training blocks."""
    if not log.is_ours:
        return
    blocks = list(_blocks(log))
    time_s, steps_s = sum(block.time_s for block in blocks), sum(block.steps_s for block in blocks)
    if -TOO_SHORT_S - TOO_SHORT * steps_s <= time_s - steps_s <= TOO_LONG_S + TOO_LONG * time_s:
        return
    worst = max(blocks, key=lambda block: abs(block.time_s - block.steps_s))
    where = f"most of the difference is between lines {worst.start.line} and {worst.end.line}"
    message = f"training took {time_s:,.1f} s, but its steps add up to {steps_s:,.1f} s; {where}"
    yield finding("LOG-20", "error", worst.end.line, message)


def _blocks(log: Log) -> Iterator[Block]:
    """Yield the blocks whose steps are all listed. Records inside them wait for the device, as evaluations do."""
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
