"""Check logs of engine=command: what only the program says, damaged records, and its times against the runner's."""

from collections.abc import Iterator
from statistics import median

from bench.contract import mllog
from bench.mlperf.log import Log, finding, number
from bench.mlperf.reader import Event, printable
from bench.rules.finding import Finding

STEP_S, STEP = 0.005, 0.1
"""By how much the program's step time may differ from the runner's: seconds, and a share. Lines that are read in
batches shift single steps, so the median over the records of a log is compared."""
RUN_S, RUN = 1.0, 0.02
"""By how much the program's time of the run may differ: seconds, and a share."""


def _check_word(log: Log) -> Iterator[Finding]:
    """Yield how many records have values that only the program says."""
    if not log.all(mllog.PROGRAM):
        return
    keys = (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY)
    own = [event for key in keys for event in log.all(key) if event.metadata.get(mllog.BY_PROGRAM)]
    if own:
        what = (
            f"{len(own)} losses and evaluations come from the program: runstop timed the steps, but did not "
            f"compute the losses"
        )
        yield finding("LOG-24", "warning", min(event.line for event in own), what)


def _check_damaged(log: Log) -> Iterator[Finding]:
    """Yield records of the program that were damaged, and so are not in this log."""
    for event in log.all(mllog.PROGRAM_OUTPUT):
        count = number(event.metadata.get("unreadable"))
        if count:
            first = printable(str(event.metadata.get("first_unreadable")))
            what = f"{count:,.0f} of the program's records could not be read; the first one: {first:.200}"
            yield finding("LOG-09", "error", event.line, what)


def _check_times(log: Log) -> Iterator[Finding]:
    """Yield that the program's own times contradict the runner's clock."""
    pairs = [pair for event in log.all(mllog.TRACKED_STATS) if (pair := _step_times(event))]
    if pairs:
        own_s, timed_s = median(own for own, _ in pairs), median(timed for _, timed in pairs)
        if abs(own_s - timed_s) > max(STEP_S, STEP * timed_s):
            what = (
                f"a step takes {own_s:,.3g} s according to the program, but {timed_s:,.3g} s according to the "
                f"runner's clock (medians)"
            )
            yield finding("LOG-25", "warning", log.all(mllog.TRACKED_STATS)[0].line, what)
    for event in log.all(mllog.PROGRAM_OUTPUT):
        own, timed = _own(event, "total_time_s"), number(event.metadata.get("runner_s"))
        if own is not None and timed is not None and own > timed + max(RUN_S, RUN * timed):
            what = f"the program says that it trained {own:,.1f} s, but it ran only {timed:,.1f} s"
            yield finding("LOG-25", "error", event.line, what)
    yield from _check_run(log)


def _check_run(log: Log) -> Iterator[Finding]:
    """Yield that the program's run_start and run_stop contradict the times at which the runner read them."""
    start, stop = log.single(mllog.RUN_START), log.single(mllog.RUN_STOP)
    times = [number(event.metadata.get(mllog.PROGRAM_TIME_MS)) if event else None for event in (start, stop)]
    if start is None or stop is None or times[0] is None or times[1] is None:
        return
    own_s, timed_s = (times[1] - times[0]) / 1000, (stop.time_ms - start.time_ms) / 1000
    if abs(own_s - timed_s) > max(RUN_S, RUN * timed_s):
        what = (
            f"run_start to run_stop takes {own_s:,.1f} s according to the program, but {timed_s:,.1f} s "
            f"according to the runner's clock"
        )
        yield finding("LOG-25", "error", stop.line, what)


def _step_times(event: Event) -> tuple[float, float] | None:
    """Return the mean step time of a record by the program and by the runner; None if one is missing."""
    timed = number(event.value.get("train_step_time")) if isinstance(event.value, dict) else None
    own = _own(event, "step_time_s")
    return None if own is None or timed is None else (own, timed)


def _own(event: Event, name: str) -> float | None:
    """Return a value that the program says about a record."""
    own = event.metadata.get(mllog.BY_PROGRAM)
    return number(own.get(name)) if isinstance(own, dict) else None


CHECKS = (_check_word, _check_damaged, _check_times)
