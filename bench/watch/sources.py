"""Find the trials to watch: those of a run folder, of logs, or of a replayed log."""

import math
import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from bench.backends.protocol import JobState
from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.contract.plan import Command, Plan
from bench.contract.run_files import JOB, JOB_OUTPUTS, PLAN, PREPARE_LOG, RESULTS, STATUS
from bench.errors import BenchError, ConfigError, NotALogError
from bench.mlperf import reader
from bench.mlperf.reader import Event, Follower, printable
from bench.runs import folder as folders
from bench.runs import ledger, names
from bench.runs import run as runs
from bench.watch import prediction, trackers
from bench.watch.hardware import Gpus
from bench.watch.lines import View
from bench.watch.prediction import Planned
from bench.watch.progress import Phase, Progress
from bench.watch.tracker import Tracker
from bench.watch.trackers import Curves

QUERY_INTERVAL_S = 10.0
"""Seconds between two queries of the job's state."""


class Queue:
    """The state of a run's job; the backend is queried at most every QUERY_INTERVAL_S seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._queried_s = folder, -math.inf
        self._run: runs.Run | None = None

    def is_over(self) -> bool:
        """Whether the job has written its status, or its backend reports that it has ended."""
        if (self._folder / STATUS).exists():
            return True
        run = self._look()
        return run is not None and run.state is not None and not run.is_active

    @property
    def waits_for(self) -> str:
        """What a trial that has not started waits for."""
        run = self._look()
        if run is None or not run.jobs or run.state is None or run.state.state is JobState.running:
            return "the first line of its log"
        return f"job {run.jobs[-1]}: {run.state.native_state}" + (f" ({run.state.reason})" if run.state.reason else "")

    def _look(self) -> runs.Run | None:
        if time.monotonic() - self._queried_s > QUERY_INTERVAL_S:
            self._queried_s = time.monotonic()
            with suppress(BenchError):
                self._run = runs.find(self._folder)
        return self._run


RUNNING: tuple[Phase, ...] = ("training", "evaluating", "measuring", "generating")
"""Between run_start and run_stop."""


class Source(Protocol):
    """A source of log events."""

    restarts: int

    def poll(self) -> list[Event]: ...


class Replay:
    """A finished log whose events are replayed at `speed` times their original rate."""

    restarts = 0

    def __init__(self, path: Path, *, speed: float, from_end: bool = False) -> None:
        self._events, self._next, self._speed = reader.read(path)[0], 0, speed
        if not self._events:
            raise NotALogError(
                "the file is not a log that can be replayed: it has no MLLOG line",
                where=str(path),
                fix="give the result_K.txt of a trial",
            )
        self._began, self._first_ms = time.monotonic(), self._events[-1 if from_end else 0].time_ms

    def now_ms(self) -> int:
        return self._first_ms + round((time.monotonic() - self._began) * self._speed * 1000)

    def poll(self) -> list[Event]:
        now_ms, start = self.now_ms(), self._next
        while self._next < len(self._events) and self._events[self._next].time_ms <= now_ms:
            self._next += 1
        return self._events[start : self._next]

    @property
    def is_over(self) -> bool:
        return self._next == len(self._events)


@dataclass(slots=True)
class Watched:
    """A log with the progress of its trial."""

    name: str
    source: Source
    planned: Planned = Planned()
    trials: int = 1
    """The number of sequential trials in the log."""
    outcome: str | None = None
    """The outcome in the ledger, once the trial has ended."""
    curves: Curves | None = None
    """Writes curves for experiment trackers."""
    gpus: Gpus | None = None
    """Reads GPU samples while the trial runs; None for a log without a run folder."""
    _tracker: Tracker = field(default_factory=Tracker)
    _restarts: int = 0

    def poll(self) -> None:
        events = self.source.poll()
        if self.source.restarts != self._restarts:
            self._restarts, self._tracker = self.source.restarts, Tracker()
            if self.curves:
                self.curves.restart()
        self._tracker.update(events)
        if self.curves:
            self.curves.update(events)

    @property
    def progress(self) -> Progress:
        return self._tracker.progress

    @property
    def has_begun(self) -> bool:
        return self.progress.phase != "waiting"

    @property
    def is_ended(self) -> bool:
        """Whether the log is complete, or its trial has ended."""
        return self.outcome is not None or (self.progress.phase == "stopped" and self.progress.trial >= self.trials)

    @property
    def is_reached(self) -> bool:
        """Whether the last trial has reached the target."""
        return self.progress.trial >= self.trials and prediction.reached(self.progress, self.planned)

    def view(self, now_ms: int, *, waits_for: str = "the first line of its log") -> View:
        progress, name = self.progress, self.name
        if self.trials > 1 or progress.trial > 1:
            name += f" trial {progress.trial}" + (f" of {self.trials}" if self.trials >= progress.trial else "")
        note = "the log was restarted" if self._restarts else None
        if not self.has_begun:
            note = f"waiting for {waits_for}" if self.outcome is None else "the trial ended before it started"
        if self.outcome is not None and progress.phase != "stopped":
            now_ms = now_ms if progress.last_ms is None else progress.last_ms  # it ended without a run_stop
            progress = replace(progress, phase="stopped", status=self.outcome)
        return View(
            name=name,
            progress=progress,
            planned=self.planned,
            outlook=prediction.look(progress, self.planned, now_ms),
            outcome=self.outcome,
            hottest=self.gpus.hottest(now_ms) if self.gpus and progress.phase in RUNNING else None,
            note=note,
        )


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class WatchedTrials:
    """The watched trials: those of one run folder, or of several logs."""

    trials: tuple[Watched, ...]
    prepare: Watched | None = None
    """The log that is shown until the first trial starts."""
    folder: Path | None = None
    """The run folder, with the ledger (outcomes of trials) and the status (end of the run)."""
    is_over: Callable[[], bool] = lambda: False
    """Whether the run has ended, so that no log will grow."""
    ends_with_logs: bool = True
    """Whether watching ends when all trials have stopped."""
    now_ms: Callable[[], int] = _wall_clock_ms
    queue: Queue | None = None
    """The job state of a run that has a job."""

    @property
    def _watched(self) -> tuple[Watched, ...]:
        return (*self.trials, self.prepare) if self.prepare else self.trials

    def poll(self) -> None:
        for watched in self._watched:
            watched.poll()
        if self.folder is not None:
            outcomes = _outcomes(self.folder)
            for number, watched in enumerate(self.trials):
                watched.outcome = outcomes.get(number)

    def close(self) -> None:
        for curves in filter(None, (watched.curves for watched in self.trials)):
            curves.close()

    def close_logs(self) -> None:
        """Close the logs, to forget the job; a later poll would read them from their start."""
        for watched in self._watched:
            if isinstance(watched.source, Follower):
                watched.source.close()

    def has_stopped(self) -> bool:
        return self.ends_with_logs and all(watched.is_ended for watched in self.trials)

    def is_reached(self) -> bool:
        return all(watched.is_reached for watched in self.trials)

    def views(self) -> list[View]:
        shown = self.trials
        if self.prepare and self.prepare.has_begun and not any(watched.has_begun for watched in shown):
            shown = (self.prepare,)
        waiting = {"waits_for": self.queue.waits_for} if self.queue else {}
        return [watched.view(self.now_ms(), **waiting) for watched in shown]


def find(paths: Sequence[Path], *, trials: int = 1, walltime_min: float | None = None) -> WatchedTrials:
    """Return the job of a run folder, or of logs.

    Raises:
        ConfigError: no path, or folders and logs together; also as `run_folder`.
    """
    folders = [path for path in paths if path.is_dir()]
    if len(folders) == len(paths) == 1 and (trials, walltime_min) == (1, None):
        return run_folder(folders[0])
    if folders or not paths:
        what, fix = "no run folder or log is given", "give a run folder or the logs of trials"
        if len(paths) > 1:
            what, fix = "a run folder is given together with other paths", "give only the run folder, or only logs"
        elif paths:
            what = "a run folder is given together with --trials or --walltime, which are only for logs"
            fix = "remove --trials and --walltime"
        raise ConfigError(what, where=", ".join(map(str, paths)) or "command line", fix=fix)
    return log_files(paths, trials=trials, walltime_min=walltime_min)


def run_folder(folder: Path, *, tracks: bool = True) -> WatchedTrials:
    """Return the trials of a run folder from its plan; without a plan, the logs in the folder.

    Without `tracks`, experiment trackers get nothing, so that nothing is written or sent.

    Raises:
        ConfigError: the folder has neither, or its plan cannot be read.
    """
    if not (folder / PLAN).exists():
        return log_files(_logs(folder))
    plan = plan_kinds.load(folder / PLAN)
    count = len(plan.trials)
    if not count:
        raise ConfigError(
            "this run only checks its nodes, so there is no trial to watch",
            where=str(folder),
            fix=f"to see the result of the check: runstop why {shlex.quote(str(folder))}",
        )
    has_others = bool(folders.other_writers(folder))  # trackers write into the folder, and some send to a server
    trials = tuple(
        Watched(
            f"{command.name} ({trial.index + 1} of {count})",
            Follower(folder / trial.log),
            planned(plan, command),
            curves=None if has_others or not tracks else trackers.curves(plan, folder, trial=Path(trial.log).stem),
            gpus=Gpus(folder, trial.index),
        )
        for trial, command in zip(plan.trials, plans.trial_commands(plan), strict=True)
    )
    command = plans.command(plan, plans.PREPARE)
    log = Follower(folder / PREPARE_LOG)
    prepare = Watched(command.name, log, planned(plan, command)) if command else None
    queue = Queue(folder) if (folder / JOB).exists() else None
    return WatchedTrials(trials, prepare, folder, queue.is_over if queue else (folder / STATUS).exists, queue=queue)


def log_files(paths: Sequence[Path], *, trials: int = 1, walltime_min: float | None = None) -> WatchedTrials:
    """Return the trials of logs that need not exist yet, each with one or several trials.

    Raises:
        ConfigError: a path can never become a log, or is likely a mistyped run folder.
    """
    for path in paths:
        if not path.exists() and not (path.suffix and path.parent.is_dir()):
            raise names.missing(path, files=True)
    limits = Planned(limit_min=walltime_min)
    are_alike = len({path.name for path in paths}) < len(paths)
    shown = [printable(str(path) if are_alike else path.name) for path in paths]
    return WatchedTrials(
        tuple(Watched(n, Follower(path), limits, trials) for n, path in zip(shown, paths, strict=True))
    )


def replay(
    path: Path, *, speed: float, from_end: bool = False, trials: int = 1, walltime_min: float | None = None
) -> WatchedTrials:
    """Return a finished log as a running job; `from_end`: at the time of its last record."""
    source = Replay(path, speed=speed, from_end=from_end)
    watched = Watched(printable(path.name), source, Planned(limit_min=walltime_min), trials)
    return WatchedTrials((watched,), is_over=lambda: source.is_over, now_ms=source.now_ms)


def planned(plan: Plan, command: Command) -> Planned:
    """Return the planned values of a trial, or of the training in its prepare command."""
    trained, is_preparing = plan_kinds.training_plan(plan), command.name == plans.PREPARE
    if is_preparing and trained is not None:
        trained = trained.base or trained
    if trained is None:
        return Planned(title=plan.config.task.name, is_published=False, limit_min=command.limit_min)
    return Planned(
        title=trained.config.task.name,
        max_samples=trained.max_samples,
        eval_samples=tuple(plan_kinds.samples(trained, at) for at in trained.evaluation.at_steps),
        target=trained.config.training.target_eval_loss,
        is_published=trained.config.task.submittable,
        limit_min=command.limit_min,
        stall=None if is_preparing else trained.config.launch.stall,
    )


def _logs(folder: Path) -> list[Path]:
    """Return the logs of trials in a folder, ordered by number."""
    for pattern in (RESULTS, JOB_OUTPUTS):
        if logs := sorted(folder.glob(pattern), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]):
            return logs
    raise ConfigError(
        f"there is nothing to watch: the folder has no {PLAN}, {RESULTS} or {JOB_OUTPUTS}",
        where=str(folder),
        fix="give a run folder, or the log of a trial",
    )


def _outcomes(folder: Path) -> dict[int, str]:
    """Return the outcomes of finished trials from the ledger, by number."""
    return {entry.trial: entry.outcome for entry in ledger.entries(folder) if not entry.outcome.is_open}
