"""Say what a log proves: is the trial valid, then how fast it was; or why neither.

A number that the log does not prove is None. The official checker (`bench.referee`) is the referee; the findings here come
with a line number and also cover what it lets pass, such as an aborted run.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench import mllog
from bench.mllog import Event, Garbled, is_number, printable

UNVERIFIED = "Unverified. Result not verified by MLCommons Association."
"""What stands beside every number of ours that looks like a score."""

RULES = {
    "LOG-01": "the clock never starts",
    "LOG-02": "the clock never stops",
    "LOG-03": "the clock starts or stops more than once, as in a log that was appended to",
    "LOG-04": "events stand in the wrong order",
    "LOG-05": "the run does not say that it succeeded",
    "LOG-06": "nothing was evaluated",
    "LOG-07": "the last evaluation is above the target",
    "LOG-08": "a value is not a finite number",
    "LOG-09": "a record is garbled",
    "LOG-10": "a required key is missing",
    "LOG-11": "a key that stands once stands several times",
    "LOG-12": "the target is easier than the official one",
    "LOG-13": "an evaluation stands outside run_start to run_stop",
}

OFFICIAL_TARGETS = {"llama2_70b_lora": 0.925, "llama31_8b": 3.3}
"""Evaluation loss at or below which a run has converged. Source: MLPerf Training rules, v5.1."""

_ORDER = (mllog.INIT_START, mllog.INIT_STOP, mllog.RUN_START, mllog.RUN_STOP)
_SUBMISSION = (
    *(mllog.SUBMISSION_BENCHMARK, mllog.SUBMISSION_DIVISION, mllog.SUBMISSION_ORG),
    *(mllog.SUBMISSION_PLATFORM, mllog.TRAIN_SAMPLES, mllog.EVAL_SAMPLES),
)
_RECIPE = (
    *(mllog.GLOBAL_BATCH_SIZE, mllog.GRADIENT_ACCUMULATION_STEPS, mllog.LORA_RANK, mllog.LORA_ALPHA),
    *(mllog.OPT_BASE_LEARNING_RATE, mllog.OPT_LEARNING_RATE_TRAINING_STEPS),
    *(mllog.OPT_ADAMW_WEIGHT_DECAY, mllog.OPT_GRADIENT_CLIP_NORM),
)
_ONCE = {"closed": (*_SUBMISSION, *_RECIPE), "open": _SUBMISSION}
"""What a llama2_70b_lora log of a division says exactly once; rulesets from 6.1 on want more, which `bench.referee` checks."""

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason to doubt a log; `line` is where to look first."""

    rule: str
    severity: Severity
    line: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One eval_accuracy record."""

    samples: float | None
    """Trained on so far; None where the log counts epochs or steps instead."""
    value: float
    line: int
    time_ms: int
    metric: str | None = None
    """Which of several metrics (stable_diffusion: FID, CLIP); None where the benchmark has one."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a measured quantity is distributed; units are those of the field that holds it."""

    median: float
    p10: float
    p90: float
    mean: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One of the trials of a log: from its run_start (or its first record, for the first one) on."""

    first_line: int
    last_line: int
    run_start_ms: int
    run_stop_ms: int | None
    minutes: float | None
    status: str | None
    seed: int | None
    eval_final: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one log says about one trial."""

    file: str
    benchmark: str | None
    division: str | None
    org: str | None
    platform: str | None
    status: str | None
    """As run_stop gives it: success or aborted."""
    run_start_ms: int | None
    run_stop_ms: int | None
    minutes: float | None
    init_s: float | None
    """First init_start to init_stop, in seconds."""
    evaluations: tuple[Evaluation, ...]
    train_losses: tuple[tuple[float | None, float], ...]
    """(samples, loss) pairs."""
    target: float | None
    """Value to reach; None where none is logged and no official one known."""
    higher_is_better: bool
    """Whether a value at or above the target reaches it, as for an accuracy; a loss must be at or below."""
    eval_final: float | None
    samples_to_target: float | None
    """Of the first evaluation that reaches the target."""
    converged: bool
    """The last evaluation reaches the target; False without a target."""
    seed: int | None
    global_batch_size: int | None
    step_time_ms: Spread | None
    """Of an optimizer step; each measurement is the mean over the steps between two log lines of one training block."""
    step_times_ms: tuple[tuple[float, float], ...]
    """(samples, step time) of each measurement, in order."""
    eval_time_s: float | None
    """Median of eval_start to eval_stop, in seconds."""
    throughput_samples_s: float | None
    """Samples trained on over the time spent training, evaluations apart."""
    num_gpus: int | None
    """As the log's SYSJSON record or num_ranks says."""
    tokens_s_gpu: float | None
    """Throughput times sequence length over num_gpus."""
    system: dict[str, Any]
    """The log's SYSJSON record: what the system description of a submission is filled from; empty where there is none."""
    hyperparameters: dict[str, Any]
    """What is logged before run_start, submission and seed apart."""
    trials: tuple[Span, ...]
    """One for each run_start; an appended log has several, and then none of the numbers above belongs to a single one."""
    findings: tuple[Finding, ...]
    valid: bool
    """No finding is an error: the trial was completed and, where there is a target, reached it."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as strict JSON holds them, without NaN."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Log:
    """The records of a file with the look-ups that every question needs."""

    events: tuple[Event, ...]
    garbled: tuple[Garbled, ...]

    def all(self, key: str) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.key.rstrip() == key)

    def single(self, key: str) -> Event | None:
        found = self.all(key)
        return found[0] if len(found) == 1 else None

    def numeric(self, key: str) -> Iterator[Event]:
        return (event for event in self.all(key) if is_number(event.value))

    def value(self, key: str) -> Any:
        """Return what the log says of a key; None if nothing, or not always the same."""
        values = [event.value for event in self.all(key)]
        return values[0] if values and all(value == values[0] for value in values) else None

    def text(self, key: str) -> str | None:
        return _text(self.value(key))

    def integer(self, key: str) -> int | None:
        value = self.value(key)
        return int(value) if is_number(value) and value == int(value) else None


def parse(path: Path | str) -> Result:
    """Return what a log proves.

    Raises:
        LogError: the file cannot be opened; no content makes this fail.
    """
    events, garbled = mllog.read(path)
    log = _Log(tuple(events), tuple(garbled))
    start, stop = log.single(mllog.RUN_START), log.single(mllog.RUN_STOP)
    evaluations = tuple(Evaluation(_samples(e), e.value, e.line, e.time_ms) for e in log.numeric(mllog.EVAL_ACCURACY))
    target = _target(log)
    reached = [e for e in evaluations if target is not None and e.value <= target]
    findings = tuple(finding for check in _CHECKS for finding in check(log))
    return Result(
        file=str(path),
        benchmark=log.text(mllog.SUBMISSION_BENCHMARK),
        division=log.text(mllog.SUBMISSION_DIVISION),
        org=log.text(mllog.SUBMISSION_ORG),
        platform=log.text(mllog.SUBMISSION_PLATFORM),
        status=_text(stop.metadata.get("status")) if stop else None,
        run_start_ms=start.time_ms if start else None,
        run_stop_ms=stop.time_ms if stop else None,
        minutes=_minutes(log),
        evaluations=evaluations,
        train_losses=tuple((_samples(e), e.value) for e in log.numeric(mllog.TRAIN_LOSS)),
        target=target,
        eval_final=evaluations[-1].value if evaluations else None,
        samples_to_target=reached[0].samples if reached else None,
        converged=_converged(log),
        seed=log.integer(mllog.SEED),
        global_batch_size=log.integer(mllog.GLOBAL_BATCH_SIZE),
        init_s=None,
        higher_is_better=False,
        step_time_ms=None,
        step_times_ms=(),
        eval_time_s=None,
        num_gpus=None,
        tokens_s_gpu=None,
        system={},
        trials=(),
        throughput_samples_s=_median(log, "throughput"),
        hyperparameters=_hyperparameters(log),
        findings=findings,
        valid=all(finding.severity != "error" for finding in findings),
    )


def title(result: Result) -> str:
    """Return what was measured where, as a headline."""
    return printable(f"{result.benchmark or 'training'} on {result.platform or 'a platform that is not logged'}")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _samples(event: Event) -> float | None:
    samples = event.metadata.get("samples_count")
    return samples if is_number(samples) else None


def _minutes(log: _Log) -> float | None:
    """Return run_start to run_stop, if each stands once and in this order, by line and by clock."""
    clock = [event for event in log.events if event.key in (mllog.RUN_START, mllog.RUN_STOP)]
    if [event.key for event in clock] != [mllog.RUN_START, mllog.RUN_STOP] or clock[1].time_ms < clock[0].time_ms:
        return None
    return (clock[1].time_ms - clock[0].time_ms) / 60_000


def _target(log: _Log) -> float | None:
    """Return the loss to reach: None for benchmarks known to us by name only, where more may be better."""
    benchmark, logged = log.value(mllog.SUBMISSION_BENCHMARK), log.value(mllog.TARGET_ACCURACY)
    if log.all(mllog.SUBMISSION_BENCHMARK) and benchmark not in list(OFFICIAL_TARGETS):
        return None
    return logged if is_number(logged) else OFFICIAL_TARGETS.get(benchmark)


def _converged(log: _Log) -> bool:
    target, evaluations = _target(log), log.all(mllog.EVAL_ACCURACY)
    last: Any = evaluations[-1].value if evaluations else None
    return target is not None and is_number(last) and last <= target


def _median(log: _Log, name: str, *, scale: float = 1) -> float | None:
    stats: list[Any] = [e.value.get(name) for e in log.all(mllog.TRACKED_STATS) if isinstance(e.value, dict)]
    numbers = [value * scale for value in stats if is_number(value)]
    return median(numbers) if numbers else None


def _hyperparameters(log: _Log) -> dict[str, Any]:
    apart = ("submission_", mllog.CACHE_CLEAR, mllog.SEED, mllog.TRACKED_STATS, mllog.EVAL_ACCURACY, mllog.TRAIN_LOSS)
    before = takewhile(lambda event: event.key != mllog.RUN_START, log.events)
    points = (e for e in before if e.event_type == "POINT_IN_TIME" and not e.key.startswith(apart))
    return {e.key: e.value for e in points if is_number(e.value) or not isinstance(e.value, list | dict | float)}


def _check_clock(log: _Log) -> Iterator[Finding]:
    for key, rule in ((mllog.RUN_START, "LOG-01"), (mllog.RUN_STOP, "LOG-02")):
        found = log.all(key)
        if not found:
            yield Finding(rule, "error", None, f"no {key}: there is no time to score")
        if len(found) > 1:
            yield Finding("LOG-03", "error", found[1].line, f"{len(found)} x {key}, but a log holds one trial")
    for stop in log.all(mllog.RUN_STOP):
        if (status := stop.metadata.get("status")) != mllog.SUCCESS:
            yield Finding("LOG-05", "error", stop.line, f"run_stop has status {status!r:.40}, not 'success'")


def _check_order(log: _Log) -> Iterator[Finding]:
    first = [next((n for n, e in enumerate(log.events) if e.key == key), None) for key in _ORDER]
    present = [n for n in first if n is not None]
    if present != sorted(present):
        order = " < ".join(log.events[n].key for n in sorted(present))
        message = f"{order}; wanted {' < '.join(_ORDER)}"
        yield Finding("LOG-04", "error", log.events[min(present)].line, message)
    elif log.single(mllog.RUN_START) and (stop := log.single(mllog.RUN_STOP)) and _minutes(log) is None:
        yield Finding("LOG-04", "error", stop.line, "by its time_ms, run_stop comes before run_start")


def _check_evaluations(log: _Log) -> Iterator[Finding]:
    target, evaluations = _target(log), log.all(mllog.EVAL_ACCURACY)
    if not evaluations:
        yield Finding("LOG-06", "warning" if target is None else "error", None, "no eval_accuracy in this log")
    elif target is not None and not _converged(log):
        last = evaluations[-1]
        yield Finding("LOG-07", "error", last.line, f"last evaluation {last.value!r:.40}, target {target}")
    inside = target is None
    for event in log.events:
        if target is not None and event.key in (mllog.RUN_START, mllog.RUN_STOP):
            inside = event.key == mllog.RUN_START
        elif event.key.rstrip() == mllog.EVAL_ACCURACY and not inside:
            message = f"eval_accuracy {event.value!r:.40} does not stand between run_start and run_stop"
            yield Finding("LOG-13", "error", event.line, message)


def _check_records(log: _Log) -> Iterator[Finding]:
    wanted = (mllog.EVAL_ACCURACY, mllog.TRAIN_LOSS, mllog.TARGET_ACCURACY)
    bad = [e for e in log.events if not is_number(e.value) and (isinstance(e.value, float) or e.key.rstrip() in wanted)]
    for key, count in Counter(event.key for event in bad).items():
        first = next(event for event in bad if event.key == key)
        yield Finding("LOG-08", "error", first.line, f"{count} x {key} is {first.value!r:.40}")
    if log.garbled:
        torn = log.garbled[0]
        yield Finding("LOG-09", "error", torn.line, f"{len(log.garbled)} garbled: {torn.reason} in {torn.text}")


def _check_keys(log: _Log) -> Iterator[Finding]:
    """Yield what every log must say, and what the rules of llama2_70b_lora want on top."""
    present = Counter(event.key for event in log.events)
    official = log.value(mllog.SUBMISSION_BENCHMARK) == "llama2_70b_lora"
    once = _ONCE["open" if log.value(mllog.SUBMISSION_DIVISION) == "open" else "closed"] if official else ()
    for key in (mllog.INIT_START, mllog.INIT_STOP, *once, *[mllog.CACHE_CLEAR] * official):
        if not present[key]:
            yield Finding("LOG-10", "error", None, f"no {key}")
    for key in dict.fromkeys((mllog.INIT_STOP, mllog.SUBMISSION_BENCHMARK, mllog.TARGET_ACCURACY, *once)):
        if present[key] > 1:
            severity: Severity = "warning" if log.value(key) is not None else "error"
            yield Finding("LOG-11", severity, log.all(key)[1].line, f"{key} stands {present[key]} times")


def _check_target(log: _Log) -> Iterator[Finding]:
    target, official = _target(log), OFFICIAL_TARGETS.get(log.text(mllog.SUBMISSION_BENCHMARK) or "")
    if target is not None and official is not None and target > official:
        yield Finding(
            "LOG-12",
            "error",
            log.all(mllog.TARGET_ACCURACY)[0].line,
            f"target_accuracy is {target}, the official target {official}",
        )


_CHECKS = (_check_clock, _check_order, _check_evaluations, _check_target, _check_records, _check_keys)
