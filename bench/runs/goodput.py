"""What the wall-clock time of a training run went to: effective training, and what restarts, stalls and others took.

The time of a trial is from the beginning of its first attempt to the end of its last one, by the ledger and the logs of
all attempts. Each moment of it belongs to exactly one part, so that the shares add up to 1. A run of several trials has
the sum of its trials.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from statistics import median

from bench.contract import mllog, plan_kinds, regular_files, run_files
from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.errors import BenchError, ConfigError, LogError
from bench.mlperf import log as logs
from bench.mlperf.log import Log, number
from bench.mlperf.reader import Event, is_number
from bench.mlperf.speed import listed_s
from bench.runs import ledger
from bench.runs.folder import short
from bench.runs.ledger import Attempt, Entry, Outcome

STALL_FACTOR = 2.0
"""A step that takes more than so many times the median step of its trial has a stall: its time beyond the median."""


class Part(Enum):
    """What takes time. The value says what is counted."""

    training = "steps whose result was kept"
    evaluation = "from eval_start to eval_stop"
    checkpoints = "training stopped for a checkpoint"
    stalls = "steps beyond the median step, if they took more than twice of it; silent ranks before the watchdog's end"
    start = "first attempt, until run_start: containers, ranks, weights, warm-up"
    repeated = "restarts: steps, evaluations and checkpoints that a later attempt did again"
    down = "restarts: from the last record of an interrupted attempt to the next attempt: unlogged steps, queue, pause"
    restart = "restarts: later attempts, until run_start"
    end = "after run_stop: last checkpoint, adapters, judging"
    other = "between run_start and run_stop: rows, loading a checkpoint, gaps between blocks"


RESTARTS = (Part.repeated, Part.down, Part.restart)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialTime:
    """The time of one trial."""

    trial: int
    outcome: Outcome
    num_attempts: int
    """Attempts whose time is known."""
    seconds: Mapping[Part, float]
    notes: tuple[str, ...]

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The time of the trials of a run."""

    folder: Path
    num_gpus: int | None
    """None on CPUs."""
    trials: tuple[TrialTime, ...]

    @property
    def seconds(self) -> dict[Part, float]:
        return {part: sum(trial.seconds[part] for trial in self.trials) for part in Part}

    @property
    def wall_s(self) -> float:
        return sum(trial.wall_s for trial in self.trials)

    @property
    def effective(self) -> float:
        """Training whose result was kept, divided by all time."""
        return self.share(self.seconds[Part.training])

    def share(self, seconds: float) -> float:
        """Return the share of all time; 0 if the run began and ended in the same millisecond."""
        return seconds / self.wall_s if self.wall_s else 0.0

    def gpu_hours(self, seconds: float) -> float | None:
        """Return the GPU hours of a time; None on CPUs."""
        return None if self.num_gpus is None else self.num_gpus / 3600 * seconds

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"trial {trial.trial}: {note}" for trial in self.trials for note in trial.notes)


def of_run(folder: Path) -> Goodput:
    """Return what the time of a run went to.

    Raises:
        ConfigError: the run does not train.
        LogError: no attempt has a log with a run_start yet.
        BenchError: the ledger cannot be read.
    """
    plan = plan_kinds.load(folder / run_files.PLAN)
    if plan_kinds.training_plan(plan) is None:
        raise ConfigError(
            f"goodput shows only training runs, but this run is of kind {plan.config.task.kind.name}",
            where=str(folder),
            fix=f"to see the results of this run: runstop report {short(folder)}",
        )
    trials = tuple(time for entry in ledger.read(folder) if (time := _of_trial(folder, entry)) is not None)
    if not trials:
        raise LogError(
            "no attempt of this run has reached run_start, so there is no time to analyze",
            where=str(folder),
            fix=f"to see why: runstop why {short(folder)}",
        )
    return Goodput(folder=folder, num_gpus=_num_gpus(plan), trials=trials)


def _num_gpus(plan: Plan) -> int | None:
    is_gpu = plan.config.cluster.device is Device.cuda
    return plan.world.num_nodes * plans.gpus_per_node(plan) if is_gpu else None


@dataclass(kw_only=True)
class _Attempt:
    """One attempt."""

    log: Log
    """Without records if the attempt wrote none."""
    begin_ms: float
    end_ms: float
    silent_s: float
    """How long a rank made no progress before the watchdog ended the attempt; 0 without a report."""

    @cached_property
    def batch(self) -> int | None:
        """Global batch size, to count steps in logs that only count samples."""
        return self.log.integer(mllog.GLOBAL_BATCH_SIZE)

    def step(self, event: Event) -> float | None:
        if (step := number(event.metadata.get("step"))) is not None:
            return step
        samples = number(event.metadata.get("samples_count"))
        return samples / self.batch if samples is not None and self.batch else None

    @property
    def resumed(self) -> float:
        """The step from which it resumed; 0 if it began anew."""
        record = next(iter(self.log.all(mllog.RESUMED)), None)
        return 0.0 if record is None else self.step(record) or 0.0

    @property
    def has_started(self) -> bool:
        return bool(self.log.all(mllog.RUN_START))

    @property
    def has_trained(self) -> bool:
        """Whether it came to training; before that, its log does not say from which step it would resume."""
        return bool(self.log.all(mllog.BLOCK_START))

    @cached_property
    def steps_s(self) -> dict[int, float]:
        """Seconds of each step that the log lists."""
        listed: dict[int, float] = {}
        for event in self.log.all(mllog.TRACKED_STATS):
            if (last := self.step(event)) is not None:
                times = listed_s(event)
                listed |= {round(last) - len(times) + 1 + place: time for place, time in enumerate(times)}
        return listed


def _of_trial(folder: Path, entry: Entry) -> TrialTime | None:
    """Return the time of a trial; None if no attempt reached run_start."""
    attempts = list(_attempts(folder, entry))
    if not any(attempt.has_started for attempt in attempts):
        return None
    for attempt, later in zip(attempts, attempts[1:], strict=False):
        attempt.end_ms = max(later.begin_ms, attempt.begin_ms)
    every_step_s = [seconds for attempt in attempts for seconds in attempt.steps_s.values()]
    usual_s = median(every_step_s) if every_step_s else None
    seconds = dict.fromkeys(Part, 0.0)
    for place, attempt in enumerate(attempts):
        kept = min((later.resumed for later in attempts[place + 1 :] if later.has_trained), default=None)
        is_last = place == len(attempts) - 1
        clock = _Clock(
            attempt=attempt, is_first=place == 0, is_last=is_last, kept=kept, usual_s=usual_s, seconds=seconds
        )
        clock.run()
    notes = []
    if any(known.began_ms is None for known in entry.attempts) or not entry.attempts:
        notes.append("the ledger has no times (an earlier version wrote it): the start of the ranks is not counted")
    if entry.outcome is Outcome.running:
        notes.append("it still runs, or was killed: counted until its last record")
    elif not entry.outcome.is_result:
        notes.append("it is not complete: a later attempt may have to repeat steps that are counted as training")
    if usual_s is None:
        notes.append("the log does not list its steps: stalls in steps are not known")
    return TrialTime(
        trial=entry.trial, outcome=entry.outcome, num_attempts=len(attempts), seconds=seconds, notes=tuple(notes)
    )


def _attempts(folder: Path, entry: Entry) -> Iterator[_Attempt]:
    """Yield the attempts of a trial whose beginning is known, by the ledger or by their logs."""
    every = entry.attempts or (Attempt(outcome=entry.outcome),)
    for place, known in enumerate(every, 1):
        moved = None if place == len(every) else place
        log = _log(folder, entry.trial, moved)
        began_ms = known.began_ms
        begin_ms = began_ms if began_ms is not None else next((event.time_ms for event in log.events), None)
        if begin_ms is None:
            continue
        last_ms = max([begin_ms, *(event.time_ms for event in log.events)])
        yield _Attempt(
            log=log,
            begin_ms=begin_ms,
            end_ms=max(last_ms, known.ended_ms or 0),
            silent_s=_silent_s(folder, entry.trial, moved),
        )


def _log(folder: Path, trial: int, number: int | None) -> Log:
    """Return the log of an attempt (None: the last one); without records if it wrote none."""
    place = folder if number is None else folder / run_files.attempt(trial, number)
    with suppress(BenchError, OSError):
        return logs.read(place / run_files.result(trial))
    return Log((), ())


def _silent_s(folder: Path, trial: int, number: int | None) -> float:
    """Return the longest silence that a rank's watchdog reported in an attempt; 0 without a report."""
    stacks = Path(run_files.stack(f"trial {trial}", "*"))
    place = folder / stacks.parent if number is None else folder / run_files.attempt(trial, number)
    longest = 0.0
    for path in sorted(place.glob(stacks.name)):
        with suppress(OSError, ValueError, AttributeError):
            reported = json.loads(regular_files.read_text(path).partition("\n")[0]).get("silent_s")
            longest = max(longest, reported if is_number(reported) else 0.0)
    return longest


@dataclass(slots=True, kw_only=True)
class _Clock:
    """Goes through the records of an attempt, and gives each period to a part."""

    attempt: _Attempt
    is_first: bool
    is_last: bool
    kept: float | None
    """The last step whose result later attempts used; None: all."""
    usual_s: float | None
    seconds: dict[Part, float]
    now_ms: float = field(init=False)
    block: float | None = field(default=None, init=False)
    """The step at which the current block began."""
    is_in_block: bool = field(default=False, init=False)
    tracked: tuple[float, float | None] | None = field(default=None, init=False)
    """Time and step of the last record of the current block."""

    def run(self) -> None:
        self.now_ms = self.attempt.begin_ms
        is_running = is_over = False
        for event in self.attempt.log.events:
            key, step = event.key.rstrip(), self.attempt.step(event)
            if key == mllog.RUN_START and not is_running:
                self._until(event.time_ms, Part.start if self.is_first else Part.restart)
                is_running = True
            elif not is_running or is_over:
                continue
            elif key == mllog.RUN_STOP and step is None and event.metadata.get("status") == mllog.ABORTED:
                break  # an interruption, at any moment of a step
            elif key == mllog.BLOCK_START:
                self._until(event.time_ms, Part.other)
                self.is_in_block, self.block, self.tracked = True, step, None
            elif key == mllog.TRACKED_STATS and self.is_in_block:
                self.tracked = event.time_ms, step
            elif key in (mllog.BLOCK_STOP, mllog.EVAL_START, mllog.RUN_STOP):
                self._end_block(event.time_ms, step)
                is_over = key == mllog.RUN_STOP
            elif key == mllog.EVAL_STOP:
                self._until(event.time_ms, self._if_kept(Part.evaluation, step))
            elif key == mllog.CHECKPOINT:
                saving_ms = 1000 * (number(event.value) or 0.0)
                self._until(event.time_ms - saving_ms, Part.other)
                self._until(event.time_ms, self._if_kept(Part.checkpoints, step))
        if self.is_in_block and self.tracked is not None:  # what follows its last record is not known
            self._end_block(*self.tracked)
        if not is_over:
            self._until(self.now_ms + 1000 * self.attempt.silent_s, Part.stalls)
        self._until(self.attempt.end_ms, Part.end if is_over and self.is_last else Part.down)

    def _until(self, time_ms: float, part: Part) -> None:
        """Give the time until a moment to a part. Clocks that go back, or records after the end, take nothing."""
        time_ms = min(max(time_ms, self.now_ms), self.attempt.end_ms)
        self.seconds[part] += (time_ms - self.now_ms) / 1000
        self.now_ms = time_ms

    def _if_kept(self, part: Part, step: float | None) -> Part:
        is_kept = self.kept is None or (step is not None and step <= self.kept)
        return part if is_kept else Part.repeated

    def _end_block(self, time_ms: float, step: float | None) -> None:
        """Split a block between steps that were kept, their stalls, and steps that were done again."""
        if not self.is_in_block:
            return self._until(time_ms, Part.other)
        self.is_in_block = False
        before = self.seconds[Part.training]
        self._until(time_ms, Part.training)
        took_s = self.seconds[Part.training] - before
        lost_s, stalled_s = self._lost_and_stalled(took_s, self.block, step)
        self.seconds[Part.training] -= lost_s + stalled_s
        self.seconds[Part.repeated] += lost_s
        self.seconds[Part.stalls] += stalled_s
        return None

    def _lost_and_stalled(self, took_s: float, first: float | None, last: float | None) -> tuple[float, float]:
        """Return the seconds of a block that were done again, and those that kept steps stalled."""
        if first is None or last is None or last <= first:
            return (0.0, 0.0) if self.kept is None else (took_s, 0.0)
        kept, listed = last if self.kept is None else min(max(self.kept, first), last), self.attempt.steps_s
        steps = range(round(first) + 1, round(last) + 1)
        if not steps or not all(step in listed for step in steps):
            return took_s * (last - kept) / (last - first), 0.0
        total_s = sum(listed[step] for step in steps)
        scale = took_s / total_s if total_s > 0 else 0.0
        lost_s = scale * sum(listed[step] for step in steps if step > kept)
        usual_s = self.usual_s or 0.0
        over_s = [listed[step] - usual_s for step in steps if step <= kept and listed[step] > STALL_FACTOR * usual_s]
        return lost_s, min(1.0, scale) * sum(over_s)
