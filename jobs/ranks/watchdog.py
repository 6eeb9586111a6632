"""Look for a stall from a thread of each rank: a step or an evaluation that takes many times as long as usual.

A rank that waits in a collective runs no Python, so the thread relies on nothing but its own clock. It measures in this
run what is usual; before that, as while a checkpoint is loaded, only the time-outs of the process groups hold. A rank
that finds itself stalled writes where it stands, the others follow, and the lowest rank that has written ends the
trial with the account of all. A rank without a report is stopped, or its node is gone.

Where every rank is stopped, or the interpreters of all are blocked, nobody is left to look: the time limit of the job
is for that.
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
from jobs.ranks import stall_report
from jobs.ranks.identity import Rank
from jobs.ranks.stall_report import Report

STARTING, LOADING, TRAINING, EVALUATION, SAVING = "starting", "loading", "training", "evaluation", "saving"
MERGING = "merging"
"""What a rank does. How long starting, loading and saving take was not measured before: they have no limit. Nor has
merging groups that train apart, which has one of its own."""
MEASURING = "measuring"
"""Kernels; their steps are points, and the plan says how long one takes."""
POLL_S, POLLS = 1.0, 8
"""Seconds between two looks of the thread, and how many there are at least until the smallest limit."""
Alive = Callable[[str, int, Any], object]
"""Takes a phase, the steps that are done, and for a step of a GPU the event that ends it there."""
KEPT = 101
"""So many measurements are remembered; their median is what is usual."""
NOBODY, LAST_RESORT = 2, 6
"""In graces, after its own report: when a rank acts in place of a lower one that did not, and when it just ends."""


def nobody_asks(phase: str, step: int, end: Any) -> None:
    """Take what a rank says of its progress where no watchdog runs."""


class Beats:
    """Takes how far the rank is, and measures what its steps and evaluations usually take."""

    def __init__(self) -> None:
        self._new: deque[tuple[str, int, Any]] = deque(maxlen=4096)
        self._taken_s: dict[str, deque[float]] = {}
        self._step_since_s: tuple[int, float] | None = None
        self.phase, self.step, self.since_s = STARTING, 0, 0.0

    def add(self, phase: str, step: int, end: Any) -> None:
        self._new.append((phase, step, end))

    def measured(self, phase: str, seconds: float) -> None:
        self._taken_s.setdefault(phase, deque(maxlen=KEPT)).append(seconds)

    def usual_s(self, phase: str) -> float | None:
        """Return how long a step of training, or an evaluation, usually takes; None before the first."""
        taken_s = self._taken_s.get(phase)
        return median(taken_s) if taken_s else None

    def take(self, now_s: float) -> bool:
        """Take the beats since the last look; return whether there were any. Steps are timed together."""
        phases = {self.phase}
        any_came = False
        while self._new and _is_over(self._new[0][2]):
            phase, step, _ = self._new.popleft()
            if self.phase == EVALUATION != phase:
                self.measured(EVALUATION, now_s - self.since_s)
            self.phase, self.step, self.since_s, any_came = phase, step, now_s, True
            phases.add(phase)
        if not any_came:
            return False
        if phases == {TRAINING} and self._step_since_s and self.step > self._step_since_s[0]:
            first, first_s = self._step_since_s
            self.measured(TRAINING, (now_s - first_s) / (self.step - first))
        self._step_since_s = (self.step, now_s) if self.phase == TRAINING else None
        return True


def _is_over(end: Any) -> bool:
    """Return whether the device has reached the end of a step: an event of a GPU, asked without waiting for it."""
    try:
        return not hasattr(end, "query") or bool(end.query())
    except RuntimeError:  # the device has failed, which the main thread will meet
        return False


class Watchdog:
    """Watches this rank from `start` on."""

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
        """Watch a rank; `gpu` is the number of its GPU on its node, if it has one. The thread has no current device."""
        self._who, self._stall, self._folder, self._command, self._fail = who, stall, folder, command, fail
        self._gpu = gpu
        self._nodes: Sequence[str] = ()
        self._beats = Beats()
        self._looked_s = 0.0
        self._report: Report | None = None
        self._reported_s = 0.0
        self.alive: Alive = self._beats.add
        """To be told how far this rank is; this costs no more than appending to a list."""

    def start(self, nodes: Sequence[str]) -> None:
        """Start to watch, with the node of each rank. Of groups that train apart each watches its own ranks."""
        self._nodes = nodes
        self._file(self._who.rank).unlink(missing_ok=True)
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def expect(self, *, step_s: float, eval_s: float) -> float:
        """Take what the warm-up says of the first step and the first evaluation; return the longest limit."""
        self._beats.measured(TRAINING, step_s)
        self._beats.measured(EVALUATION, eval_s)
        return self._stall.limit_s(max(step_s, eval_s))

    def expect_points(self, seconds: float) -> float:
        """Take how long a rank that measures kernels is silent by the plan at most; return the limit."""
        self._beats.measured(MEASURING, seconds)
        return self._stall.limit_s(seconds)

    def _watch(self) -> None:
        """Look again and again. Time in which this process was stopped itself, as in a suspended job, hardly counts."""
        poll_s, awake_s, last_s = min(POLL_S, self._stall.floor_s / POLLS), 0.0, time.monotonic()
        while True:
            time.sleep(poll_s)
            now_s = time.monotonic()
            awake_s += min(now_s - last_s, 2 * poll_s)
            last_s = now_s
            self.look(awake_s)

    def look(self, now_s: float) -> None:
        """Do what is to be done at this time: nothing, report, take the report back, or end the trial."""
        if self._beats.take(now_s) and self._report is not None:
            self._go_on(now_s)
        silent_s, usual_s = now_s - self._beats.since_s, self._beats.usual_s(self._beats.phase)
        if self._report is not None:
            self._decide(now_s - self._reported_s)
        elif usual_s is not None and silent_s > self._stall.limit_s(usual_s):
            self._stand_still(now_s, usual_s)
        elif silent_s > self._stall.grace_s and now_s - self._looked_s >= self._stall.grace_s / 2:
            self._looked_s = now_s
            if self._reports():  # somebody waits for this rank, which has no limit yet or a higher one
                self._stand_still(now_s, usual_s)

    def _stand_still(self, now_s: float, usual_s: float | None) -> None:
        """Report where this rank stands. Should the run folder hang as well, the rank ends without this thread."""
        faulthandler.dump_traceback_later(LAST_RESORT * self._stall.grace_s, exit=True)
        at, is_waiting = stall_report.where_main_thread_stands()
        self._reported_s, self._report = (
            now_s,
            Report(
                rank=self._who.rank,
                node=self._nodes[self._who.rank],
                phase=self._beats.phase,
                step=self._beats.step,
                silent_s=round(now_s - self._beats.since_s, 3),
                usual_s=usual_s,
                at=at,
                is_waiting=is_waiting or stall_report.device_is_busy(self._gpu),
            ),
        )
        with suppress(OSError):  # the disk is full: the others then take this rank for silent
            stall_report.write(self._file(self._who.rank), self._report)

    def _go_on(self, now_s: float) -> None:
        """Take the report back: the rank has moved after all."""
        faulthandler.cancel_dump_traceback_later()
        self._file(self._who.rank).unlink(missing_ok=True)
        after = f"{now_s - self._reported_s:.0f} s after it seemed to have stalled"
        print(f"rank {self._who.rank} goes on, {after}", file=sys.stderr, flush=True)
        self._report = None

    def _decide(self, waited_s: float) -> None:
        """End the trial once every rank has reported or had the time to; the lowest one that reported does."""
        files, grace_s = self._reports(), self._stall.grace_s
        if len(files) < len(self._ranks) and waited_s < grace_s:
            return
        assert self._report is not None
        reports = stall_report.read(files) | {self._who.rank: self._report}
        if min(reports) == self._who.rank or waited_s > NOBODY * grace_s:
            stacks = run_files.stack(self._command, "*")
            self._fail(stall_report.verdict(reports, self._nodes, stacks, ranks=self._ranks))

    def _reports(self) -> list[Path]:
        return [path for path in map(self._file, self._ranks) if path.exists()]

    @property
    def _ranks(self) -> Sequence[int]:
        own = groups.mine()
        return own.ranks if own else range(len(self._nodes))

    def _file(self, rank: int) -> Path:
        return self._folder / run_files.stack(self._command, rank)
