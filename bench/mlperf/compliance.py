"""Check a log by the rules: report everything that a log of a completed, converged trial does not have.

The official checker (`bench.mlperf.official`) decides. These checks add line numbers, accept any input, and cover what
the official checker accepts: an aborted run, other values of fixed hyperparameters, other rows, another evaluation
schedule.
"""

from collections.abc import Iterator
from typing import Any

from bench.contract import mllog
from bench.mlperf import (
    clock_checks,
    local_sgd,
    pace_checks,
    program_checks,
    provenance_checks,
    recipe_checks,
    slow_ranks,
    step_checks,
    telemetry,
)
from bench.mlperf.benchmarks import BENCHMARKS, DISCLOSED
from bench.mlperf.log import Log, finding
from bench.mlperf.official import RULESETS, ruleset_of
from bench.mlperf.reader import Event, is_number
from bench.rules.finding import Finding, Severity
from bench.texts import counted, nearest

_ORDER = (
    (mllog.INIT_START, mllog.INIT_STOP),
    (mllog.SUBMISSION_DIVISION, mllog.INIT_STOP),  # it decides how long init may take
    (mllog.INIT_STOP, mllog.RUN_START),
    (mllog.INIT_START, mllog.RUN_START),
    (mllog.RUN_START, mllog.BLOCK_START),
    (mllog.RUN_START, mllog.RUN_STOP),
)
"""The last record of the first key must be before the first record of the second key."""
_TIMED = (mllog.RUN_START, mllog.RUN_STOP)
_EVERYWHERE = (
    *(mllog.SUBMISSION_BENCHMARK, mllog.SUBMISSION_DIVISION, mllog.SUBMISSION_ORG),
    *(mllog.SUBMISSION_PLATFORM, mllog.TRAIN_SAMPLES, mllog.EVAL_SAMPLES),
)
"""Keys that a log of a fully checked benchmark has exactly once, in every division."""
_COUNTED: dict[str, tuple[str, ...]] = {
    mllog.BLOCK_START: ("samples_count", "epoch_count"),
    mllog.BLOCK_STOP: ("samples_count", "first_epoch_num"),
    **dict.fromkeys(("epoch_start", "epoch_stop", mllog.EVAL_START, mllog.EVAL_STOP), ("samples_count", "epoch_num")),
    mllog.EVAL_ACCURACY: ("samples_count", "epoch_num"),
}
"""Records whose metadata count the progress of training, in one of these units."""
_WITHOUT_TRAINING = (mllog.ANSWERS_REQUESTED, mllog.LOADS_REQUESTED, mllog.KERNELS_REQUESTED)
"""Records of logs that do not train, so they have no evaluation."""
_INIT_LIMIT_MIN = {False: 30, True: 240}
"""True: open division."""
_MAX_SHOWN = 5


def judge(log: Log) -> tuple[Finding, ...]:
    """Return every finding; an error means that the log is not a valid trial."""
    return tuple(finding for check in _CHECKS for finding in check(log))


def minutes(log: Log) -> float | None:
    """Return the minutes from run_start to run_stop, if each is logged once and in this order, by line and by time.

    For a trial that was resumed from a checkpoint, run_start is that of its first attempt, so that lost time counts;
    None if the log does not have it.
    """
    start, stop = log.single(mllog.RUN_START), log.single(mllog.RUN_STOP)
    if start is None or stop is None or _is_before(log, stop, start) or stop.time_ms < start.time_ms:
        return None
    began_ms = start.time_ms
    for event in log.all(mllog.RESUMED):
        first_ms = event.metadata.get(mllog.FIRST_RUN_START_MS)
        if not isinstance(first_ms, int) or first_ms > start.time_ms:
            return None
        began_ms = first_ms
    return (stop.time_ms - began_ms) / 60_000


def _is_before(log: Log, one: Event, other: Event) -> bool:
    """Return whether one event is before another in the file; a line may hold several."""
    if one.line != other.line:
        return one.line < other.line
    return next(event for event in log.events if event is one or event is other) is one


def _check_clock(log: Log) -> Iterator[Finding]:
    for key, rule in zip(_TIMED, ("LOG-01", "LOG-02"), strict=True):
        records = log.all(key)
        if not records:
            why = "the time to train is unknown" if log.events else "it has no MLLOG record"
            yield finding(rule, "error", None, f"the log has no {key}: {why}")
        if len(records) > 1:
            lines = ", ".join(str(event.line) for event in records[:_MAX_SHOWN])
            message = f"the log has {len(records)} records {key} (lines {lines}), but a trial has only one"
            yield finding("LOG-03", "error", records[1].line, message)
    for stop in log.all(mllog.RUN_STOP):
        if (status := stop.metadata.get("status")) != mllog.SUCCESS:
            yield finding("LOG-05", "error", stop.line, f"run_stop has the status {status!r:.40} instead of 'success'")


def _check_order(log: Log) -> Iterator[Finding]:
    order = (*_ORDER, *(log.benchmark.order if log.benchmark else ()))
    pairs = [(log.all(one)[-1], log.all(other)[0]) for one, other in order if log.all(one) and log.all(other)]
    once = not log.all(mllog.RUN_START)[1:]
    backwards = [(one, other) for one, other in pairs if once and _is_before(log, other, one)]
    for one, other in backwards[:1]:
        yield finding(
            "LOG-04", "error", other.line, f"{other.key} is before {one.key} in the log, but must be after {one.key}"
        )
    start, stop = log.single(mllog.RUN_START), log.single(mllog.RUN_STOP)
    if not backwards and start and stop and stop.time_ms < start.time_ms:
        yield finding("LOG-04", "error", stop.line, "time_ms of run_stop is before run_start")


def _check_init(log: Log) -> Iterator[Finding]:
    starts, stop = log.all(mllog.INIT_START), log.single(mllog.INIT_STOP)
    if not starts or stop is None or log.benchmark is None:
        return
    took_min = (stop.time_ms - min(event.time_ms for event in starts)) / 60_000
    if took_min >= (limit := _INIT_LIMIT_MIN[log.is_open]):
        yield finding(
            "LOG-14", "error", stop.line, f"initialisation took {took_min:.1f} min, but the limit is {limit} min"
        )


def _check_evaluations(log: Log) -> Iterator[Finding]:
    records = log.all(mllog.EVAL_ACCURACY)
    if not records:
        if log.goals or not any(map(log.all, _WITHOUT_TRAINING)):
            yield finding("LOG-06", "error" if log.goals else "warning", None, "the log has no eval_accuracy")
    elif log.goals and not log.converged:
        last, goals = records[-1].value, " and ".join(map(str, log.goals))
        required = f"the target is {goals}"
        if len(log.goals) == 1 and is_number(last) and log.goals[0].is_below_any_loss(last):
            required = f"a loss must be above {log.goals[0].least:g}"
        yield finding("LOG-07", "error", records[-1].line, f"the last evaluation is {last!r:.40}, but {required}")
    yield from _check_open_metric(log)
    yield from _check_places(log)


def _check_open_metric(log: Log) -> Iterator[Finding]:
    """Yield that a log of the open division does not have its evaluations under the key of the rule file, too."""
    key = log.benchmark.open_metric if log.benchmark and log.is_open else None
    if key is None or log.benchmark is None:
        return
    records, goal = log.all(key), log.benchmark.goals[0]
    if not records:
        yield finding("LOG-10", "error", None, f"the log has no {key}, which MLPerf's open division requires")
    elif not any(is_number(event.value) and goal.is_reached_by(event.value) for event in records):
        what = f"no {key} reaches the target of MLPerf's open division, {goal}"
        yield finding("LOG-07", "error", records[-1].line, what)
    if uncounted := [event for event in records if not _is_count(event.metadata.get("samples_count"))]:
        yield finding("EVL-03", "error", uncounted[0].line, f"{_have(len(uncounted), key)} no samples_count")


def _check_places(log: Log) -> Iterator[Finding]:
    """Yield the first evaluation outside run_start to run_stop, by line or by time, and how many there are."""
    if not log.goals or (log.benchmark and log.benchmark.evaluates_afterwards):
        return
    inside, outside = False, []
    start, stop = (log.single(key) if minutes(log) is not None else None for key in _TIMED)
    for event in log.events:
        if event.key in _TIMED:
            inside = event.key == mllog.RUN_START
        elif event.key == mllog.EVAL_ACCURACY:
            timed = start is None or stop is None or start.time_ms <= event.time_ms <= stop.time_ms
            outside += [] if inside and timed else [event]
    if outside:
        more = f", and {len(outside) - 1} more" if outside[1:] else ""
        message = f"eval_accuracy {outside[0].value!r:.40} is not between run_start and run_stop{more}"
        yield finding("LOG-13", "error", outside[0].line, message)


def _check_target(log: Log) -> Iterator[Finding]:
    if log.benchmark is None or len(log.goals) != 1:
        return
    goal, official = log.goals[0], log.benchmark.goals[0]
    easier = goal.value < official.value if official.higher_is_better else goal.value > official.value
    if easier:
        line = log.all(mllog.TARGET_ACCURACY)[0].line
        message = f"target_accuracy is {goal.value:g}, but the official target is {official.value:g}"
        yield finding("LOG-12", "error", line, message)


def _check_benchmark(log: Log) -> Iterator[Finding]:
    """Yield a benchmark without rules here, and a log of the closed division without one: no rules apply to either."""
    name = log.text(mllog.SUBMISSION_BENCHMARK)
    is_closed = log.text(mllog.SUBMISSION_DIVISION) == "closed" and log.has_target
    if is_closed and not log.all(mllog.SUBMISSION_BENCHMARK):
        line = log.all(mllog.SUBMISSION_DIVISION)[0].line
        message = f"the log is of the closed division, but has no {mllog.SUBMISSION_BENCHMARK}"
        yield finding("LOG-10", "error", line, message)
    if name is not None and name not in BENCHMARKS:
        similar = nearest(name, BENCHMARKS, likeness=0.8)
        meant = f"; did you mean {similar}?" if similar else ""
        line = log.all(mllog.SUBMISSION_BENCHMARK)[0].line
        yield finding("LOG-23", "error", line, f"runstop has no rules for the benchmark {name!r:.60}{meant}")


def _check_records(log: Log) -> Iterator[Finding]:
    numeric = [mllog.EVAL_ACCURACY, mllog.TRAIN_LOSS, mllog.TARGET_ACCURACY]
    if log.text(mllog.SUBMISSION_BENCHMARK) is not None and log.benchmark is None:
        numeric.remove(mllog.EVAL_ACCURACY)  # that of maskrcnn is an object
    for key, events in log.by_key.items():
        bad = [e for e in events if not is_number(e.value) and (isinstance(e.value, float) or key in numeric)]
        if bad:
            yield finding(
                "LOG-08",
                "error",
                bad[0].line,
                f"{key} is {bad[0].value!r:.40}, which is not a finite number ({counted(len(bad), 'record')})",
            )
    if log.garbled:
        first, count = log.garbled[0], len(log.garbled)
        yield finding(
            "LOG-09",
            "error",
            first.line,
            f"{counted(count, 'record')} {'is' if count == 1 else 'are'} malformed; the first one: {first.reason} in "
            f"{first.text}",
        )


def _check_weights(log: Log) -> Iterator[Finding]:
    """Yield that random data is not a benchmark; a log with random data that names one is not valid."""
    if not log.has_random_rows:
        return
    line = (log.all(mllog.DATA_SOURCE) or log.all(mllog.INITIAL_WEIGHTS))[0].line
    claimed = [key for key in (mllog.SUBMISSION_BENCHMARK, mllog.TARGET_ACCURACY) if log.all(key)]
    if claimed:
        yield finding(
            "LOG-16",
            "error",
            line,
            f"the data is random, but the log has {' and '.join(claimed)}, which only a submission has",
        )
    else:
        yield finding("LOG-16", "warning", line, "the data is random, so the log measures only speed")


def _check_resumed(log: Log) -> Iterator[Finding]:
    """Yield that an earlier attempt trained the first steps, so the log has no time to train."""
    for event in log.all(mllog.RESUMED)[:1]:
        samples = event.metadata.get("samples_count")
        severity: Severity = "error" if log.has_target else "warning"
        what = f"the run resumed from a checkpoint after step {event.value!r:.20} ({samples!r:.20} samples)"
        lost_s, replayed = (event.metadata.get(name) for name in ("lost_s", "replayed_samples"))
        if isinstance(lost_s, int | float) and isinstance(replayed, int):
            what += f"; the minutes include {lost_s:.1f} s that were lost; {replayed:,} samples were trained again"
        yield finding("LOG-21", severity, event.line, f"{what}: the log covers only a part of the trial")


def _check_keys(log: Log) -> Iterator[Finding]:
    """Yield missing and repeated keys, of every log and of the rules of a fully checked benchmark."""
    known = log.benchmark if log.benchmark and log.benchmark.once else None
    once = (*_EVERYWHERE, *(() if log.is_open else known.once)) if known else ()
    disclosed = DISCLOSED if known else ()
    blocks = (mllog.BLOCK_START, mllog.BLOCK_STOP, mllog.CACHE_CLEAR) if known else ()
    for key in (mllog.INIT_START, mllog.INIT_STOP, *once, *blocks):
        twin = key.replace("block", "epoch")
        if not log.all(key) and not log.all(twin):
            yield finding("LOG-10", "error", None, f"the log has no {key}" + (f" or {twin}" if twin != key else ""))
    if _is_recent(log) and (absent := [key for key in disclosed if not log.all(key)]):
        yield finding(
            "LOG-10", "warning", None, f"the log has no {', '.join(absent)}, which ruleset {RULESETS[-1]} requires"
        )
    for key in dict.fromkeys((mllog.INIT_STOP, mllog.SUBMISSION_BENCHMARK, mllog.TARGET_ACCURACY, *once, *disclosed)):
        if len(records := log.all(key)) > 1:
            same = all(event.value == records[0].value for event in records)
            message = f"{key} occurs {len(records)} times, with {'the same value' if same else 'different values'}"
            yield finding("LOG-11", "warning" if same else "error", records[1].line, message)
    for key in (mllog.SUBMISSION_BENCHMARK, mllog.SUBMISSION_DIVISION):
        for event in log.all(key)[:1]:
            if not isinstance(event.value, str):
                yield finding("REC-01", "error", event.line, f"{key} is {event.value!r:.40}, but must be a text")
            elif known and key == mllog.SUBMISSION_DIVISION and event.value not in ("closed", "open"):
                yield finding(
                    "REC-01", "error", event.line, f"{key} is {event.value!r:.40}, but must be closed or open"
                )


def _is_recent(log: Log) -> bool:
    """Return whether the newest ruleset was in force when the run started."""
    start = log.single(mllog.RUN_START)
    return start is not None and ruleset_of(start.time_ms) == RULESETS[-1]


def _check_counts(log: Log) -> Iterator[Finding]:
    if log.benchmark is None:
        return
    for key, units in _COUNTED.items():
        is_evaluation = key == mllog.EVAL_ACCURACY
        known = (log.benchmark.counts,) if is_evaluation and log.benchmark.counts else units
        if log.benchmark.evaluates_afterwards:
            known = (*known, "step_num")
        bad = [e for e in log.all(key) if not any(_is_count(e.metadata.get(unit)) for unit in known)]
        if bad:
            rule = "EVL-03" if is_evaluation else "LOG-10"
            yield finding(rule, "error", bad[0].line, f"{_have(len(bad), key)} no {' or '.join(known)}")


def _have(number: int, key: str) -> str:
    """Return such as `1 record eval_stop has` or `2 records eval_stop have`."""
    return f"{counted(number, 'record')} {key} {'has' if number == 1 else 'have'}"


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0


def _check_seed(log: Log) -> Iterator[Finding]:
    seeds = log.all(mllog.SEED)
    if log.benchmark is None or log.is_open:
        return
    if not seeds:
        message = "the log has no seed, but MLPerf's package checker needs the seed of every run"
        yield finding("LOG-15", "error" if log.benchmark.once else "warning", None, message)
    bad = [event for event in seeds if not is_number(event.value) or event.value != int(event.value)]
    for event in bad[:1]:
        yield finding("LOG-15", "error", event.line, f"seed is {event.value!r:.40}, but must be an integer")
    if len({repr(event.value) for event in seeds}) > 1:
        yield finding("LOG-15", "warning", seeds[1].line, f"the log has {len(seeds)} seeds with different values")


_CHECKS = (
    *(
        _check_benchmark,
        _check_clock,
        _check_order,
        _check_init,
        _check_evaluations,
        _check_target,
        _check_records,
        _check_weights,
    ),
    _check_resumed,
    *(_check_keys, _check_counts, _check_seed, *recipe_checks.CHECKS, *provenance_checks.CHECKS),
    *(*program_checks.CHECKS, *clock_checks.CHECKS, *step_checks.CHECKS, *pace_checks.CHECKS),
    *slow_ranks.CHECKS,
    local_sgd.check,
    telemetry.check,
)
