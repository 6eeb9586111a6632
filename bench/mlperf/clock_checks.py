"""Check the clock of a log: times and counts that decrease, and a wall clock that disagrees with the monotonic clock.

Each of our own records has a monotonic time next to time_ms, so a changed system clock is always detected. Other logs
have time_ms only, and several processes may have written them. There, only what no published log shows is an error.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from bench.contract import mllog
from bench.mlperf.log import Log, finding, number
from bench.mlperf.reader import Event
from bench.rules.finding import Finding, Severity
from bench.texts import counted

SLEWED = 500e-6
"""The fastest rate at which NTP slews a clock: 500 ppm (the kernel's limit, adjtimex). Linux slews the monotonic clock
too, other systems may not. A clock that is set jumps instead."""
MAX_DRIFT_MS = 1000
"""How far the wall clock may move in addition to slewing: a leap second is one second."""
RUN_DRIFT, MIN_DRIFT_MS = 0.001, 20
"""Between run_start and run_stop it may move by this share of the run only, which is less for runs below 1,000 s; but
always by these milliseconds, in which the two clocks of a record are read."""
FALL_MS = 1000
"""How far time_ms may decrease in a log that is not ours. The largest decrease in 74 published logs is 51 ms, where the
records of several nodes are merged, and 0 ms after run_start, where one process writes."""


class Moment(NamedTuple):
    """One record: its wall clock, its monotonic clock, and its line."""

    time_ms: int
    monotonic_ms: float
    line: int

    @property
    def ahead_ms(self) -> float:
        """Wall clock minus monotonic clock; only changes of it have a meaning."""
        return self.time_ms - self.monotonic_ms


def _until_run_stop(log: Log, key: str | None = None) -> Sequence[Event]:
    """Return the records up to run_stop, from the first record of a key, or from the first record.

    Empty for a log of several trials (LOG-03): the time between two trials is unknown.
    """
    keys = [event.key for event in log.events]
    if len(log.all(mllog.RUN_START)) > 1:
        return ()
    begin = 0 if key is None else keys.index(key) if key in keys else len(keys)
    end = keys.index(mllog.RUN_STOP) + 1 if mllog.RUN_STOP in keys else len(keys)
    return log.events[begin:end]


def _check_clock(log: Log) -> Iterator[Finding]:
    """Yield where the clock of our own log jumped: compared with the monotonic clock, else by decreasing times."""
    if not log.is_ours:
        return
    timed = [event for event in _until_run_stop(log) if mllog.MONOTONIC_MS in event.metadata]
    moves = list(_moves(log, timed)) if timed else []
    yield from moves or _falls(_until_run_stop(log, mllog.INIT_START))


def _moves(log: Log, timed: Sequence[Event]) -> Iterator[Finding]:
    untimed = [e.line for e in _until_run_stop(log) if number(e.metadata.get(mllog.MONOTONIC_MS)) is None]
    if untimed:
        message = (
            f"{counted(len(untimed), 'record')} {'has' if len(untimed) == 1 else 'have'} no {mllog.MONOTONIC_MS}, but "
            f"other records have it: records were added or changed"
        )
        yield finding("LOG-19", "error", untimed[0], message)
        return
    moments = [Moment(e.time_ms, e.metadata[mllog.MONOTONIC_MS], e.line) for e in timed]
    back = [(a, b) for a, b in pairwise(moments) if b.monotonic_ms < a.monotonic_ms]
    for before, after in back[:1]:
        fell = f"{mllog.MONOTONIC_MS} decreases by {seconds(before.monotonic_ms - after.monotonic_ms)}"
        where = f"between lines {before.line} and {after.line}"
        yield finding(
            "LOG-19", "error", after.line, f"{fell} {where}; a monotonic clock cannot decrease: records were moved"
        )
    if not back and (pair := _clock_jump(moments, MAX_DRIFT_MS) or _clock_jump_in_run(log)):
        yield finding("LOG-19", "error", pair[1].line, _jump_text(*pair) + _both_times(log))


def _clock_jump_in_run(log: Log) -> tuple[Moment, Moment] | None:
    """Return the first two records of the run between which the wall clock moved by a share of the run."""
    moments = [Moment(e.time_ms, e.metadata[mllog.MONOTONIC_MS], e.line) for e in log.run]
    took_ms = moments[-1].monotonic_ms - moments[0].monotonic_ms if moments else 0
    return _clock_jump(moments, min(MAX_DRIFT_MS, max(MIN_DRIFT_MS, RUN_DRIFT * took_ms)))


def _clock_jump(moments: Sequence[Moment], limit_ms: float) -> tuple[Moment, Moment] | None:
    """Return the first two records between which the wall clock moved further than slewing and a limit allow.

    Slewing changes ahead_ms by at most SLEWED of the time between them. After subtracting the fastest slew in either
    direction, ahead_ms may not rise by more than the limit above its lowest value so far.
    """
    jumps: list[tuple[Moment, Moment]] = []
    for sign in (1, -1):
        left = [sign * moment.ahead_ms - SLEWED * moment.monotonic_ms for moment in moments]
        lowest = 0
        for n, value in enumerate(left):
            if value <= left[lowest]:
                lowest = n
            elif value - left[lowest] > limit_ms:
                jumps.append((moments[lowest], moments[n]))
                break
    return min(jumps, key=lambda pair: pair[1].line, default=None)


def _jump_text(before: Moment, after: Moment) -> str:
    moved_ms = after.ahead_ms - before.ahead_ms
    how = f"the wall clock was set {'forward' if moved_ms > 0 else 'back'} by {seconds(abs(moved_ms))}"
    took = seconds(after.monotonic_ms - before.monotonic_ms)
    return f"{how} between lines {before.line} and {after.line} ({took} according to the monotonic clock)"


def _both_times(log: Log) -> str:
    """Return the duration of the run by each clock; empty if one of them is missing, or if both texts are equal."""
    start, stop = log.single(mllog.RUN_START), log.single(mllog.RUN_STOP)
    if start is None or stop is None:
        return ""
    began, ended = (number(event.metadata.get(mllog.MONOTONIC_MS)) for event in (start, stop))
    if began is None or ended is None:
        return ""
    by_monotonic, by_time_ms = seconds(ended - began), seconds(stop.time_ms - start.time_ms)
    if by_monotonic == by_time_ms:
        return ""
    return f"; the run took {by_monotonic} on the monotonic clock, but {by_time_ms} according to time_ms"


def _falls(events: Sequence[Event]) -> Iterator[Finding]:
    """Yield the largest decrease of time_ms in our own log, which one process wrote."""
    falls = [(a, b) for a, b in pairwise(events) if b.time_ms < a.time_ms]
    if falls:
        before, after = max(falls, key=lambda pair: pair[0].time_ms - pair[1].time_ms)
        yield finding("LOG-19", "error", after.line, _fell(before, after, len(falls)))


def _check_falls(log: Log) -> Iterator[Finding]:
    """Yield where time_ms decreases between run_start and run_stop of a log that is not ours.

    A single decrease means that the clock was set back, unless only one record is earlier: that record was logged late.
    Several decreases mean several processes with different clocks. Benchmarks that evaluate after the run often log
    late, and some logs of others have all evaluations at their end, with the times of their checkpoints.
    """
    if log.is_ours or (log.benchmark and log.benchmark.evaluates_afterwards):
        return
    run = log.run
    falls = [n for n, (a, b) in enumerate(pairwise(run), 1) if a.time_ms - b.time_ms > FALL_MS]
    for n in falls[:1]:
        is_late = len(falls) > 1 or _is_alone(run, n) or _ends_with_evaluations(run, n)
        severity: Severity = "warning" if is_late else "error"
        yield finding("LOG-19", severity, run[n].line, _fell(run[n - 1], run[n], len(falls)))


def _ends_with_evaluations(run: Sequence[Event], place: int) -> bool:
    """Return whether all evaluations of a run, and nothing else but run_stop, are after a place."""
    keys = [event.key for event in run]
    return {*keys[place:-1]} == {mllog.EVAL_ACCURACY} and mllog.EVAL_ACCURACY not in keys[:place]


def _is_alone(run: Sequence[Event], place: int) -> bool:
    """Return whether only the time of one record is too early, and the times after it continue normally."""
    if place + 1 == len(run) or run[place + 1].time_ms < run[place - 1].time_ms:
        return False
    this, following = run[place : place + 2]
    gaps = [b.time_ms - a.time_ms for a, b in pairwise(run) if (a.key, b.key) == (this.key, following.key)]
    usual = sorted(gaps)[-2:-1]  # the longest gap of the other pairs
    return not usual or following.time_ms - this.time_ms > 1.1 * usual[0]


def _fell(before: Event, after: Event, num_falls: int) -> str:
    more = f", and at {num_falls - 1} more places" if num_falls > 1 else ""
    fell = seconds(before.time_ms - after.time_ms)
    return f"time_ms decreases by {fell} between lines {before.line} and {after.line}{more}"


def _check_counts(log: Log) -> Iterator[Finding]:
    """Yield samples or steps that do not increase from one evaluation, or one training record, to the next.

    Published logs repeat the counts of tracked_stats, and some evaluate one checkpoint several times. So in a log whose
    records are not ours only a count that decreases is reported, and none of evaluations after the run, which have any
    order. The records of a program (engine=command) are not ours, although our runner writes them to its log.
    """
    is_of_program = any(mllog.PROGRAM_TIME_MS in event.metadata for event in log.all(mllog.RUN_START))
    ours = log.is_ours and not is_of_program
    afterwards = log.benchmark is not None and log.benchmark.evaluates_afterwards
    if len(log.all(mllog.RUN_START)) > 1:
        return
    evaluations = () if afterwards and not ours else (mllog.EVAL_ACCURACY,)
    for key in (*evaluations, mllog.TRAIN_LOSS, *((mllog.TRACKED_STATS,) if ours else ())):
        for unit in ("samples_count", "step"):
            pairs = list(_not_rising(log.all(key), unit, may_repeat=not ours))
            for before, after in pairs[:1]:
                was, now = before.metadata[unit], after.metadata[unit]
                more = f", and {len(pairs) - 1} more times" if pairs[1:] else ""
                message = f"{unit} of {key} does not increase: {was:,} at line {before.line}, then {now:,}{more}"
                yield finding("LOG-04", "error" if ours else "warning", after.line, message)
                return


def _not_rising(events: Sequence[Event], unit: str, *, may_repeat: bool) -> Iterator[tuple[Event, Event]]:
    last: dict[str | None, Event] = {}
    for event in events:
        if (count := number(event.metadata.get(unit))) is None:
            continue
        metric = event.metadata.get("metric")
        metric = metric if isinstance(metric, str) else None
        before = last.get(metric)
        last[metric] = event
        if before and (count < before.metadata[unit] or (count == before.metadata[unit] and not may_repeat)):
            yield before, event


def seconds(milliseconds: float) -> str:
    """Return a duration as text."""
    return f"{milliseconds:.0f} ms" if abs(milliseconds) < 1000 else f"{milliseconds / 1000:,.1f} s"


CHECKS = (_check_clock, _check_falls, _check_counts)
