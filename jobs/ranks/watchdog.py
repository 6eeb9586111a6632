"""Detect stalls in a thread of each rank: a step or an evaluation that takes many times as long as usual.

A rank that waits in a collective runs no Python, so the thread uses only its own clock. The usual time is measured in
this run; before the first measurement, such as while a checkpoint is loaded, only the time-outs of the process groups
apply. A stalled rank writes a report with its current line, the other ranks follow, and the lowest rank with a report
ends the trial with an error that covers all of them. A rank without a report is stopped, or its node is down.

If every rank is stopped, or all interpreters are blocked, only the time limit of the job ends the trial.
"""

import faulthandler
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from bench.contract import run_files
from bench.contract.stall import Stall
from bench.errors import BenchError
from jobs.local_sgd import groups
from jobs.ranks import flight_recorder, stall_report
from jobs.ranks.identity import Rank
from jobs.ranks.stall_report import Report

STARTING, LOADING, TRAINING, EVALUATION, SAVING = "starting", "loading", "training", "evaluation", "saving"
AVERAGING = "weight averaging"
"""Phases of a rank. Starting, loading and saving were not measured before, so they have no limit here. Weight averaging
(local SGD) has a limit of its own."""
MEASURING = "measuring"
"""Of kernels: steps are points, and the plan has the longest time of one."""
POLL_S, POLLS = 1.0, 8
"""Seconds between two checks, and the smallest number of checks before the smallest limit."""
Alive = Callable[[str, int, Any], object]
"""Takes a phase, the number of completed steps, and on a GPU the CUDA event at the end of the step."""
WINDOW = 101
"""Number of measurements whose median is the usual time."""
TAKE_OVER_GRACES, HARD_EXIT_GRACES = 2, 6
"""Grace periods after a rank's own report until it ends the trial in place of a lower rank that did not, and until its
process exits without this thread."""


def ignore_progress(phase: str, step: int, end: Any) -> None:
    """Do nothing: the progress callback without a watchdog."""


class ProgressMonitor:
    """Receives the progress of the rank, and measures the usual time of its steps and evaluations."""

    def __init__(self) -> None:
        self._new: deque[tuple[str, int, Any]] = deque(maxlen=4096)
        self._times_s: dict[str, deque[float]] = {}
        self._step_since_s: tuple[int, float] | None = None
        self.phase, self.step, self.since_s = STARTING, 0, 0.0

    def add(self, phase: str, step: int, end: Any) -> None:
        self._new.append((phase, step, end))

    def measured(self, phase: str, seconds: float) -> None:
        self._times_s.setdefault(phase, deque(maxlen=WINDOW)).append(seconds)

    def usual_s(self, phase: str) -> float | None:
        """Return the median time of a training step or of an evaluation; None before the first."""
        times_s = self._times_s.get(phase)
        return median(times_s) if times_s else None

    def update(self, now_s: float) -> bool:
        """Process the progress since the last check; return whether there was any. Steps are timed together."""
        phases = {self.phase}
        has_progress = False
        while self._new and _is_over(self._new[0][2]):
            phase, step, _ = self._new.popleft()
            if self.phase == EVALUATION != phase:
                self.measured(EVALUATION, now_s - self.since_s)
            self.phase, self.step, self.since_s, has_progress = phase, step, now_s, True
            phases.add(phase)
        if not has_progress:
            return False
        if phases == {TRAINING} and self._step_since_s and self.step > self._step_since_s[0]:
            first, first_s = self._step_since_s
            self.measured(TRAINING, (now_s - first_s) / (self.step - first))
        self._step_since_s = (self.step, now_s) if self.phase == TRAINING else None
        return True


def _is_over(end: Any) -> bool:
    """Return whether the device has completed a step. Its CUDA event is queried without waiting."""
    try:
        return not hasattr(end, "query") or bool(end.query())
    except RuntimeError:  # the device has failed; the main thread will raise that error
        return False


class Watchdog:
    """Watches this rank after `start`."""

    def __init__(
        self,
        who: Rank,
        stall: Stall,
        folder: Path,
        command: str,
        fail: Callable[[BenchError], NoReturn],
        *,
        gpu: int = 0,
    ) -> None:
        """`gpu` is the number of the rank's GPU on its node; the thread has no current device."""
        self._who, self._stall, self._folder, self._command, self._fail = who, stall, folder, command, fail
        self._gpu = gpu
        self._nodes: Sequence[str] = ()
        self._monitor = ProgressMonitor()
        self._checked_s = 0.0
        self._report: Report | None = None
        self._reported_s = 0.0
        self.alive: Alive = self._monitor.add
        """Call it with the progress of this rank; it only appends to a deque."""

    def start(self, nodes: Sequence[str]) -> None:
        """Start the thread. `nodes` has the node of each rank. A local SGD group watches only its own ranks."""
        self._nodes = nodes
        self._file(self._who.rank).unlink(missing_ok=True)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def expect(self, *, step_s: float, eval_s: float) -> float:
        """Set the usual times from the warm-up; return the longest limit."""
        self._monitor.measured(TRAINING, step_s)
        self._monitor.measured(EVALUATION, eval_s)
        return self._stall.limit_s(max(step_s, eval_s))

    def expect_points(self, seconds: float) -> float:
        """Set the plan's longest time of one kernel measurement; return the limit."""
        self._monitor.measured(MEASURING, seconds)
        return self._stall.limit_s(seconds)

    def _watch(self) -> None:
        """Check periodically. Time in which this process was stopped, as in a suspended job, is not counted."""
        poll_s, awake_s, last_s = min(POLL_S, self._stall.floor_s / POLLS), 0.0, time.monotonic()
        while True:
            time.sleep(poll_s)
            now_s = time.monotonic()
            awake_s += min(now_s - last_s, 2 * poll_s)
            last_s = now_s
            self.check(awake_s)

    def check(self, now_s: float) -> None:
        """Check for a stall: do nothing, report it, withdraw the report, or end the trial."""
        if self._monitor.update(now_s) and self._report is not None:
            self._withdraw_report(now_s)
        silent_s, usual_s = now_s - self._monitor.since_s, self._monitor.usual_s(self._monitor.phase)
        if self._report is not None:
            self._decide(now_s - self._reported_s)
        elif usual_s is not None and silent_s > self._stall.limit_s(usual_s):
            self._report_stall(now_s, usual_s)
        elif silent_s > self._stall.grace_s and now_s - self._checked_s >= self._stall.grace_s / 2:
            self._checked_s = now_s
            if self._reports():  # another rank waits for this one, which has no limit yet or a higher one
                self._report_stall(now_s, usual_s)

    def _report_stall(self, now_s: float, usual_s: float | None) -> None:
        """Write the report of this rank. If the run folder hangs too, faulthandler ends the process."""
        faulthandler.dump_traceback_later(HARD_EXIT_GRACES * self._stall.grace_s, exit=True)
        at, is_waiting = stall_report.current_line()
        self._reported_s, self._report = (
            now_s,
            Report(
                rank=self._who.rank,
                node=self._nodes[self._who.rank],
                phase=self._monitor.phase,
                step=self._monitor.step,
                silent_s=round(now_s - self._monitor.since_s, 3),
                usual_s=usual_s,
                at=at,
                is_waiting=is_waiting or stall_report.device_is_busy(self._gpu),
            ),
        )
        with suppress(OSError):  # the disk is full: the others then see no report of this rank
            stall_report.write(self._file(self._who.rank), self._report)
        flight_recorder.dump(self._folder, self._command, self._who.rank)
        if self._nodes.index(self._report.node) == self._who.rank:  # the first rank of its node
            grace_s = self._stall.grace_s
            flight_recorder.ask_ras(self._folder, self._command, self._who.rank, timeout_s=grace_s)

    def _withdraw_report(self, now_s: float) -> None:
        """Withdraw the report, since the rank made progress."""
        faulthandler.cancel_dump_traceback_later()
        self._file(self._who.rank).unlink(missing_ok=True)
        flight_recorder.remove(self._folder, self._command, self._who.rank)
        after = f"{now_s - self._reported_s:.0f} s after it reported a stall"
        print(f"rank {self._who.rank} continues, {after}", file=sys.stderr, flush=True)
        self._report = None

    def _decide(self, waited_s: float) -> None:
        """End the trial once every rank has reported or its grace is over. The lowest rank with a report does that."""
        files, grace_s = self._reports(), self._stall.grace_s
        if len(files) < len(self._ranks) and waited_s < grace_s:
            return
        assert self._report is not None
        reports = stall_report.read(files) | {self._who.rank: self._report}
        if min(reports) == self._who.rank or waited_s > TAKE_OVER_GRACES * grace_s:
            stacks = run_files.stack(self._command, "*")
            self._fail(stall_report.verdict(reports, self._nodes, stacks, ranks=self._ranks))

    def _reports(self) -> list[Path]:
        return [path for path in map(self._file, self._ranks) if path.exists()]

    @property
    def _ranks(self) -> Sequence[int]:
        own = groups.current()
        return own.ranks if own else range(len(self._nodes))

    def _file(self, rank: int) -> Path:
        return self._folder / run_files.stack(self._command, rank)
