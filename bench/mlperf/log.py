"""The records of one log, with the look-ups that all checks use."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.contract import mllog
from bench.mlperf import reader
from bench.mlperf.benchmarks import BENCHMARKS, Benchmark, Goal, goals
from bench.mlperf.reader import Event, Garbled, is_number
from bench.rules.finding import Finding, Severity, broken

_COUNTS = {
    *(mllog.RUN_START, mllog.RUN_STOP, mllog.RESUMED, mllog.TIMED_FROM, mllog.BLOCK_START, mllog.BLOCK_STOP),
    *(mllog.EVAL_START, mllog.EVAL_ACCURACY, mllog.TRAIN_LOSS, mllog.TRACKED_STATS),
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """A period of training without an evaluation in between."""

    samples: float
    """Samples trained on since run_start, at its end."""
    trained: float
    """Samples trained on within it."""
    time_ms: float


def stretches(events: Iterable[Event]) -> Iterator[tuple[Event, Stretch]]:
    """Yield the training periods of a log, in order, each with the record that ends it."""
    pace = Pace()
    for event in events:
        if stretch := pace.advance(event):
            yield event, stretch


class Pace:
    """Measure training periods from the events of a log, one by one.

    Evaluations and training losses count samples from run_start on. The samples_count of a block does so in some logs
    and counts only the block in others, so it is used only if no evaluation follows the block.
    """

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, since: int | None) -> None:
        self._samples = 0.0
        self._since = since
        """When training began or a training record last counted; None outside training."""
        self._until: int | None = None
        """When the block stopped."""
        self._block: float | None = None
        self._is_evaluating = False
        """Whether an eval_start was logged, but not yet its result."""

    def advance(self, event: Event) -> Stretch | None:
        """Return the training period that an event ends, if it ends one."""
        key = event.key.rstrip()
        if key not in _COUNTS:
            return None
        stretch, counted = None, event.metadata.get("samples_count")
        samples = counted if is_number(counted) else None
        if key in (mllog.RUN_START, mllog.RUN_STOP):
            self._begin(event.time_ms if key == mllog.RUN_START else None)
        elif key in (mllog.RESUMED, mllog.TIMED_FROM):  # trained in an earlier attempt, or not timed
            self._samples, self._since = samples or 0.0, event.time_ms
        elif key == mllog.BLOCK_START:
            stretch = self._reach(self._block, self._until)
            self._since, self._until, self._is_evaluating = event.time_ms, None, False
        elif key == mllog.BLOCK_STOP:
            self._until, self._block = event.time_ms, samples
        elif key in (mllog.TRAIN_LOSS, mllog.TRACKED_STATS) and self._until is None:
            if stretch := self._reach(samples, event.time_ms):
                self._since = event.time_ms
        elif key == mllog.EVAL_START:
            self._until, self._is_evaluating = self._until or event.time_ms, True
            if samples is not None:
                stretch = self._rest(samples, self._until)
        elif key == mllog.EVAL_ACCURACY:
            if samples is not None:  # without eval_start the end of training is unknown: some blocks stop later
                stretch = self._rest(samples, self._until if self._is_evaluating else None)
            self._is_evaluating = False
        return stretch

    def _rest(self, samples: float, time_ms: int | None) -> Stretch | None:
        """Return the training period that an evaluation ends."""
        stretch = self._reach(samples, time_ms)
        self._since = self._until = None
        return stretch

    def _reach(self, samples: float | None, time_ms: int | None) -> Stretch | None:
        if samples is None or samples <= self._samples:
            return None
        since, before, self._samples = self._since, self._samples, samples
        if since is None or time_ms is None or time_ms < since or samples - before < 1:
            return None
        return Stretch(samples, samples - before, time_ms - since)


class Log:
    """The records of a file, in order. `bench.mlperf.compliance` checks them."""

    def __init__(self, events: Sequence[Event], garbled: Sequence[Garbled], path: Path | None = None) -> None:
        self.events, self.garbled = events, garbled
        self.path = path
        """The file; None for records that are not from a file, or that are only a part of it."""

    @cached_property
    def by_key(self) -> dict[str, list[Event]]:
        by_key: dict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            by_key[event.key].append(event)
        return by_key

    def all(self, key: str) -> Sequence[Event]:
        return self.by_key.get(key, ())

    def single(self, key: str) -> Event | None:
        records = self.all(key)
        return records[0] if len(records) == 1 else None

    def value(self, key: str) -> Any:
        """Return the value of a key; None if the log does not have the key, or has different values."""
        values = [event.value for event in self.all(key)]
        return values[0] if values and all(value == values[0] for value in values) else None

    def text(self, key: str) -> str | None:
        value = self.value(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        value = self.value(key)
        return int(value) if is_number(value) and value == int(value) else None

    @cached_property
    def benchmark(self) -> Benchmark | None:
        """The rules of the benchmark that the log names; None if it names no known one."""
        return BENCHMARKS.get(self.text(mllog.SUBMISSION_BENCHMARK) or "")

    @property
    def has_random_rows(self) -> bool:
        """Whether the data was random tokens. Older logs only record that the weights were random."""
        records = self.all(mllog.DATA_SOURCE) or self.all(mllog.INITIAL_WEIGHTS)
        return any(event.value == mllog.RANDOM for event in records)

    @property
    def has_target(self) -> bool:
        """Whether the run has a target, by the records so far.

        A log that names a benchmark has a target, known here or not. A log before run_start may still name one.
        """
        named = self.goals or self.all(mllog.TARGET_ACCURACY) or self.all(mllog.SUBMISSION_BENCHMARK)
        return bool(named) or not self.all(mllog.RUN_START)

    @cached_property
    def is_ours(self) -> bool:
        """Whether our own emitter wrote the log, by keys that only it writes."""
        ours = (mllog.INITIAL_WEIGHTS, mllog.DATA_SOURCE)
        return any(map(self.all, ours)) or any(mllog.MONOTONIC_MS in event.metadata for event in self.events)

    @cached_property
    def run(self) -> Sequence[Event]:
        """The records from run_start to run_stop, or to the end; empty if there is not one run_start."""
        start, stops = self.single(mllog.RUN_START), self.all(mllog.RUN_STOP)
        if start is None:
            return ()
        begin = next(n for n, event in enumerate(self.events) if event is start)
        ends = (n + 1 for n, event in enumerate(self.events) if event is stops[0]) if stops else iter(())
        return self.events[begin : next(ends, len(self.events))]

    @cached_property
    def stretches(self) -> Sequence[tuple[Event, Stretch]]:
        """The training periods, in order, each with the record that ends it."""
        return list(stretches(self.events))

    @property
    def is_open(self) -> bool:
        return self.text(mllog.SUBMISSION_DIVISION) == "open"

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """The goals of an evaluation: the logged target, else the official ones; empty for an unknown benchmark."""
        known, logged = self.benchmark, self.value(mllog.TARGET_ACCURACY)
        if known is None and self.all(mllog.SUBMISSION_BENCHMARK):
            return ()
        return goals(known, logged if is_number(logged) else None)

    @cached_property
    def evaluations(self) -> list[Event]:
        """eval_accuracy records whose value is a number."""
        return [event for event in self.all(mllog.EVAL_ACCURACY) if is_number(event.value)]

    def samples(self, event: Event) -> float | None:
        """Return how many samples the model was trained on, as counted by an evaluation or a training record."""
        unit = "epoch_num" if self.benchmark and self.benchmark.epoch_num_is_samples else "samples_count"
        return number(event.metadata.get(unit))

    @cached_property
    def first_reached(self) -> Event | None:
        """The first evaluation that reaches the target; with several goals, the one that completes them."""
        reached: dict[float | None, set[str | None]] = defaultdict(set)
        for event in self.evaluations:
            metric = event.metadata.get("metric") if len(self.goals) > 1 else None
            if any(goal.metric == metric and goal.is_reached_by(event.value) for goal in self.goals):
                samples = self.samples(event)
                done = reached[number(event.metadata.get("step_num")) if samples is None else samples]
                done.add(metric)
                if len(done) == len(self.goals):
                    return event
        return None

    @cached_property
    def converged(self) -> bool:
        """Whether the last evaluation reaches the target; with several goals, whether one checkpoint reached all."""
        records = self.all(mllog.EVAL_ACCURACY)
        if len(self.goals) != 1:
            return self.first_reached is not None
        return bool(records) and is_number(records[-1].value) and self.goals[0].is_reached_by(records[-1].value)

    def trials(self) -> Iterator["Log"]:
        """Yield the log of each trial; an appended log has several, each with its own set-up records."""
        starts = [n for n, event in enumerate(self.events) if event.key == mllog.RUN_START]
        cuts = [0, *(self._end(this, following) for this, following in pairwise(starts)), len(self.events)]
        if len(starts) == 1:
            yield self
        elif starts:
            yield from (Log(self.events[first:end], ()) for first, end in pairwise(cuts))

    def _end(self, start: int, following: int) -> int:
        """Return the index at which a trial ends: after its run_stop, else where the next trial begins its set-up."""
        between = range(start, following)
        stop = next((n + 1 for n in between if self.events[n].key == mllog.RUN_STOP), None)
        set_up = (mllog.CACHE_CLEAR, mllog.INIT_START, mllog.SUBMISSION_BENCHMARK)
        return stop or next((n for n in between if self.events[n].key in set_up), following)


def read(path: Path | str) -> Log:
    """Read a log of any content; LogError if the file cannot be opened."""
    return Log(*reader.read(path), Path(path))


def number(value: Any) -> float | None:
    """Return a value read from a log if it is a finite number."""
    return value if is_number(value) else None


def finding(rule: str, severity: Severity, line: int | None, what: str) -> Finding:
    """Return a finding about a line of a log, or about the whole log."""
    return broken(rule, what, f"line {line}" if line else "the log", severity=severity, line=line)
