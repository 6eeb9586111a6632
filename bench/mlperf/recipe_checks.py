"""Check the recipe in a log by the rules: fixed hyperparameters, valid values, and the evaluation schedule."""

import math
from collections.abc import Iterator
from typing import Any

from bench.contract import mllog
from bench.mlperf.benchmarks import PRECISION_KEYS, PRECISIONS, Range, Relation
from bench.mlperf.log import Log, finding
from bench.mlperf.official import KNOWN_ORDER, ruleset_of
from bench.mlperf.reader import is_number
from bench.rules.finding import Finding, Severity

_ROUNDING = 1e-9
"""The share by which a value may differ from one that was computed in another order."""
_WHOLE = (
    *(mllog.GLOBAL_BATCH_SIZE, mllog.GRADIENT_ACCUMULATION_STEPS, mllog.MICRO_BATCH_SIZE),
    *(mllog.TRAIN_SAMPLES, mllog.EVAL_SAMPLES, mllog.TENSOR_PARALLELISM, mllog.PIPELINE_PARALLELISM),
    *(mllog.CONTEXT_PARALLELISM, mllog.EXPERT_PARALLELISM, "num_prompts_per_step"),
)


def _check_recipe(log: Log) -> Iterator[Finding]:
    """Yield values that differ from those that the closed division fixes."""
    if log.benchmark is None or log.is_open:
        return
    for key, required in log.benchmark.fixed.items():
        for event in log.all(key)[:1]:
            if not _same(event.value, required):
                rule = "REC-02" if key in (mllog.TRAIN_SAMPLES, mllog.EVAL_SAMPLES) else "REC-01"
                expected = " or ".join(map(str, required)) if isinstance(required, tuple) else required
                yield finding(
                    rule, "error", event.line, f"{key} is {event.value!r:.40}, but the rules require {expected}"
                )
    relations = (one for one in log.benchmark.relations if _is_in_force(one.since, log, until=one.until))
    derivations: tuple[Relation | Range, ...] = (*relations, *log.benchmark.ranges)
    for derived in derivations:
        base = log.value(derived.base)
        for event in log.all(derived.key)[:1]:
            if not _follows(event.value, base, derived):
                message = f"{derived.key} is {event.value!r:.40}, but the rules require {derived.expected}"
                yield finding("REC-01", "error", event.line, message)


def _is_in_force(since: str, log: Log, *, until: str = "") -> bool:
    """Return whether a rule of the rulesets from `since` to before `until` was in force when the run started."""
    start = log.single(mllog.RUN_START)
    own = KNOWN_ORDER.index(ruleset_of(start.time_ms)) if start else len(KNOWN_ORDER) - 1
    return (not since or own >= KNOWN_ORDER.index(since)) and (not until or own < KNOWN_ORDER.index(until))


def _follows(value: Any, base: Any, derived: Relation | Range) -> bool:
    """Return whether a value is that of a relation, or within a range, for the value of its base."""
    if not is_number(value) or not is_number(base):
        return False
    try:
        if isinstance(derived, Relation):
            expected = derived.formula(base)
            return _same(value, expected) or abs(value - expected) < derived.tolerance
        return derived.low(base) * (1 - _ROUNDING) <= value <= derived.high(base) * (1 + _ROUNDING)
    except (ArithmeticError, ValueError, TypeError):  # a batch size of 0 or below has no formula
        return False


def _check_values(log: Log) -> Iterator[Finding]:
    """Yield values that are not possible in any division."""
    if log.benchmark is None or not log.benchmark.once:
        return
    for key in (*_WHOLE, *PRECISION_KEYS):
        for event in log.all(key)[:1]:
            valid = "an integer above 0" if key in _WHOLE else f"one of {', '.join(PRECISIONS)}"
            if not (_is_whole(event.value) if key in _WHOLE else event.value in PRECISIONS):
                yield finding("REC-01", "error", event.line, f"{key} is {event.value!r:.40}, but must be {valid}")
    for key in (mllog.SUBMISSION_ORG, mllog.SUBMISSION_PLATFORM, mllog.CONFIG_FILENAME):
        for event in log.all(key)[:1]:
            if event.value == "" or "PLACEHOLDER" in str(event.value):
                severity: Severity = "error" if event.value == "" else "warning"
                yield finding("REC-03", severity, event.line, f"{key} is {event.value!r:.60}, which is not a name")


def _same(value: Any, required: float | str | tuple[float | str, ...]) -> bool:
    if isinstance(required, tuple):
        return any(_same(value, each) for each in required)
    if isinstance(required, str):
        return bool(value == required)
    return is_number(value) and abs(value - required) <= _ROUNDING * abs(required)


def _is_whole(value: Any) -> bool:
    return is_number(value) and value >= 1 and value == int(value)


def _check_schedule(log: Log) -> Iterator[Finding]:
    """Yield evaluations that are not at the samples that the rules require.

    Intervals that are rounded down instead of up, a stop that is one step late, and evaluations that are less or more
    frequent are common in published results with an official score: these are warnings. Only a target that is reached
    before the first evaluation of the rules is an error.
    """
    schedule, gbs = log.benchmark and log.benchmark.schedule, log.integer(mllog.GLOBAL_BATCH_SIZE)
    if not schedule or not gbs or gbs <= 0 or log.is_open or log.all(mllog.RUN_START)[1:]:
        return
    at = [(event, samples) for event in log.evaluations if (samples := log.samples(event)) is not None]
    first, every = schedule.first(gbs), schedule.interval(gbs)
    for n, (event, samples) in enumerate(at):
        if samples != (due := first + n * every):
            message = (
                f"evaluation {n + 1} is at {samples:,.0f} samples, but is due at {due:,}; the rules require "
                f"{first:,}, then every {every:,} (GBS {gbs})"
            )
            yield finding("EVL-01", "warning", event.line, message)
            break
    if (passed := log.first_reached) and (samples := log.samples(passed)) is not None:
        due = max(0, round((samples - first) / every))
        if abs(samples - first - due * every) > gbs * (first // every + due):
            num_done = 1 + sum(before < samples for _, before in at)
            num_due = max(0, math.floor((samples - first) / every) + 1)
            severity: Severity = "warning" if num_due else "error"
            message = f"the target was reached at {samples:,.0f} samples, but the rules evaluate at other numbers"
            counts = (
                f"this is evaluation {num_done} of the run, but the rules have {num_due} until this number of samples"
            )
            yield finding("EVL-02", severity, passed.line, f"{message} ({first:,}, then every {every:,}); {counts}")


def _check_grid(log: Log) -> Iterator[Finding]:
    """Yield the first evaluation that is not where the rule file requires one, and values that no metric has."""
    if log.benchmark is None or log.all(mllog.RUN_START)[1:]:
        return
    if log.benchmark.metric_range:
        low, high = log.benchmark.metric_range
        for event in [event for event in log.evaluations if not low <= event.value <= high][:1]:
            message = f"eval_accuracy is {event.value!r:.40}, but must be from {low} to {high}"
            yield finding("REC-01", "error", event.line, message)
    grid, gbs = log.benchmark.grid, log.integer(mllog.GLOBAL_BATCH_SIZE)
    if grid is None or not gbs or gbs <= 0 or log.is_open or not _is_in_force(grid.since, log):
        return
    first, every = grid.first(gbs), grid.every(gbs) if grid.every else None
    for place, event in enumerate(log.evaluations):
        if place and every is None:
            return
        samples, due = log.samples(event), first + place * (every or 0)
        is_due = samples == due or bool(place and grid.may_skip and samples and every and samples % every == 0)
        if not is_due:
            seen = "no number of" if samples is None else f"{samples:,.0f}"
            then = f", then every {every:,}" if every else ""
            message = f"an evaluation is after {seen} samples; the rules require {first:,}{then} (GBS {gbs})"
            yield finding("EVL-01", "error", event.line, message)
            return


def _check_batch(log: Log) -> Iterator[Finding]:
    """Yield a global batch size by which an evaluation was not after a whole number of steps.

    The evaluations of all published logs are, but of those of bert, which count the samples of unpadded batches.
    """
    gbs = log.integer(mllog.GLOBAL_BATCH_SIZE)
    if log.benchmark is None or log.benchmark.epoch_num_is_samples or not gbs or gbs <= 0:
        return
    for event in log.evaluations:
        samples = log.samples(event)
        if samples is not None and samples % gbs:
            message = (
                f"an evaluation is after {samples:,.0f} samples, which is not a multiple of global_batch_size {gbs:,}"
            )
            yield finding("REC-01", "error", event.line, message)
            return


CHECKS = (_check_recipe, _check_values, _check_schedule, _check_grid, _check_batch)
