"""The state of a trial by its records: running, hung, not converging, appended to, or with a NaN loss."""

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.contract import mllog
from bench.diagnosis import fixes
from bench.diagnosis.log_scan import Clue
from bench.mlperf.reader import Event, printable
from bench.mlperf.result import Result
from bench.rules import RULES
from bench.rules.finding import Finding
from bench.rules.signs import Weight

QUIET_MIN = 10
"""Minutes without a new record, at least, after which a run no longer counts as running."""
QUIET_GAPS = 10
"""And this many times the longest pause between its records so far."""
WINDOW = 4
"""Evaluations without a lower loss that mean no convergence: no published run with a reached target has so many."""
_TRAINED_OUT = 0.95
"""A run that trained at least this share of its planned samples counts as complete."""
_LOSSES = (mllog.TRAIN_LOSS, mllog.EVAL_ACCURACY)


def judge(result: Result, events: Sequence[Event], *, is_running: bool) -> Iterator[Clue]:
    """Yield the problems that the records show in a trial that did not succeed."""
    by_rule = {finding.rule: finding for finding in reversed(result.findings)}
    if len(result.trials) > 1:
        weight = Weight.CAUSE if result.trials[-1].status == mllog.SUCCESS else Weight.OUTCOME
        yield _clue("LOG-03", weight, result, by_rule.get("LOG-03"))
    not_finite = {event.line for event in events if event.key in _LOSSES and _is_not_finite(event.value)}
    for finding in result.findings:
        if finding.rule == "LOG-08" and finding.line in not_finite:
            yield _clue("RUN-05", Weight.CAUSE, result, finding)
    if len(result.trials) != 1 or not events:
        return
    if _is_not_converging(result, is_running=is_running):
        yield _clue("RUN-06", Weight.OUTCOME, result, by_rule.get("LOG-07"))
    elif result.run_stop_ms is not None:
        yield _clue("LOG-05", Weight.OUTCOME, result, by_rule.get("LOG-05"))
    elif not is_running:
        last = events[-1]
        text = f"the last record is {last.key}, {_duration(quiet_min(Path(result.file), events))} ago"
        yield Clue("RUN-07", Weight.OUTCOME, result.file, last.line, printable(text))


def problem_clues(problems: Sequence[str], file: str) -> Iterator[Clue]:
    """Yield a clue for each problem of a log: the rule that the problem names, else RUN-12."""
    for problem in problems:
        rule = problem.partition(": ")[0]
        yield Clue(rule if rule in RULES else "RUN-12", Weight.OUTCOME, file, 1, printable(problem))


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def is_fresh(path: Path, events: Sequence[Event]) -> bool:
    """Return whether a log without an end is so new that its run may still be running."""
    if not events:
        return False
    times = [event.time_ms for event in events]
    longest_min = max((b - a for a, b in zip(times, times[1:], strict=False)), default=0) / 60_000
    return quiet_min(path, events) < max(QUIET_MIN, QUIET_GAPS * longest_min)


def quiet_min(path: Path, events: Sequence[Event]) -> float:
    """Return the minutes since the last record, by its time or by the file's, whichever is longer ago."""
    return max(0.0, time.time() - min(path.stat().st_mtime, events[-1].time_ms / 1000)) / 60


def is_flat(result: Result) -> bool:
    """Return whether the last evaluations did not lower the loss; False for accuracies and error rates."""
    losses = [evaluation.value for evaluation in result.evaluations]
    is_loss = not result.higher_is_better and result.benchmark != "rnnt"
    return is_loss and len(losses) > WINDOW and min(losses[-WINDOW:]) >= min(losses[:-WINDOW])


def _is_not_converging(result: Result, *, is_running: bool) -> bool:
    """Return whether the trial cannot reach its target: all steps trained, or evaluations no longer improve."""
    if result.target is None or result.converged or not result.evaluations:
        return False
    if is_flat(result):
        return True
    total, last = fixes.total_samples(result), result.evaluations[-1].samples
    cut_short = total is not None and last is not None and last < _TRAINED_OUT * total
    return result.run_stop_ms is not None and not is_running and (result.status == mllog.SUCCESS or not cut_short)


def _clue(rule: str, weight: Weight, result: Result, finding: Finding | None) -> Clue:
    last = result.evaluations[-1].line if result.evaluations else 1
    line = finding.line if finding and finding.line else last
    return Clue(rule, weight, result.file, line, finding.what if finding else "")


def _duration(minutes: float) -> str:
    return f"{minutes:,.0f} min" if minutes < 2 * 24 * 60 else f"{minutes / 1440:,.0f} days"
