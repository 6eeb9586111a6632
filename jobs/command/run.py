"""Run one trial of engine=command, once per rank: `python -m jobs.command.run PLAN --trial K`.

It starts the user's program as a child, reads what it prints, writes the log on rank 0, and ends the program if it
stalls, trains on values that are not finite, or if this rank must end. It needs neither torch nor the program's
packages.
"""

import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from bench.contract import mllog, run_files
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.program import Adapter, Program
from bench.contract.stall import Stall
from bench.errors import BenchError
from jobs.command import adapters, describe, records, words
from jobs.command.adapters import Reported, Unreadable
from jobs.command.child import Child, Kept, Lines
from jobs.command.records import MllogRecorder, Recorder, StepRecorder
from jobs.ranks import program as programs
from jobs.ranks.identity import node_name
from jobs.ranks.program import Begun
from jobs.tasks import earlier_attempts
from jobs.tasks.describe import log_caches

POLL_S = 0.1
CHUNK_BYTES = 1 << 16
DRAIN_S = 2.0
"""After the end of the program, how long its output is read while another process still holds it open. A failure is
reported at once, so that it is the first one: the programs of other ranks may fail because of it."""
WINDOW = 101
"""Number of pauses between two reports whose median is the usual one."""
FEWEST = 2
"""Pauses that are needed for a usual one."""
ONLY_LINES = 10
"""A program that prints lines, but reports neither a step nor an evaluation, has this many times the limit."""


def main() -> None:
    with programs.begun("jobs.command.run", __doc__, TrainingPlan) as begun:
        run(begun)


def run(begun: Begun[TrainingPlan]) -> None:
    """Start the program and follow it to its end.

    Raises:
        BenchError: it failed, stalled, left processes behind, or printed nothing that its adapter can read.
    """
    plan, who, log = begun.plan, begun.who, begun.log
    settings = plan.config.program
    assert settings is not None, "bench.planning.commands starts this module only for engine=command"
    if not words.starts_here(settings, who):
        return
    for folder in (words.output_folder, words.checkpoint_folder):
        folder(begun.folder, begun.trial).mkdir(parents=True, exist_ok=True)
    known = words.values(plan, begun.trial, who, begun.folder)
    filled = words.with_values(settings, known)
    recorder = _recorder(begun, filled)
    if who.rank == 0:
        log_caches(begun.folder / run_files.caches(begun.trial.index), log)
        log.start(mllog.INIT_START)
        describe.program(filled, settings, log)
        describe.inputs(plan, log)
    telemetry = describe.Telemetry(begun)
    recorder.start()
    child = Child(
        filled.argv, words.environment(filled, plan, who), Path(filled.folder) if filled.folder else begun.folder
    )
    followed = RunningProgram(begun, filled, child, recorder)

    def finish() -> None:
        child.stop(filled.stop_s)
        followed.keep_rest()
        followed.log_output()
        log.abort()

    begun.guard.finish = finish
    followed.to_the_end()
    telemetry.log(log)


def _recorder(begun: Begun[TrainingPlan], program: Program) -> Recorder:
    """Return what writes the log; on other ranks than 0 it writes nothing, but still finds stalls and NaN."""

    def described() -> dict[str, Any]:
        return describe.trial(begun.plan, begun.trial) if begun.who.rank == 0 else {}

    if program.adapter is Adapter.mllog:
        return MllogRecorder(begun.log, described)
    earlier = _earlier_step(begun) if program.resumes else None
    return StepRecorder(begun.plan, begun.log, described, earlier_step=earlier)


def _earlier_step(begun: Begun[TrainingPlan]) -> int | None:
    """Return the first step that the first attempt at this trial reported."""
    log = begun.folder / run_files.attempt(begun.trial.index, 1) / begun.trial.log
    return records.first_step(list(earlier_attempts.records(log)))


class RunningProgram:
    """The program while it runs: its output, its pace and its end."""

    def __init__(self, begun: Begun[TrainingPlan], program: Program, child: Child, recorder: Recorder) -> None:
        self._begun, self._program, self._child, self._recorder = begun, program, child, recorder
        self._reader = adapters.reader_of(program)
        self._is_reading = begun.who.rank == 0
        """Only the output of rank 0 is read; that of the others is kept."""
        self._printed, self._kept, self._pace = Lines(), Kept(), Pace(begun.plan.config.launch.stall)
        self._lines = self._printed if _reads_output(program) else Lines()
        self._file = None if _reads_output(program) else Path(program.file or "")
        self._offset = 0
        self._last_line, self._unreadable, self._first_unreadable = "", 0, ""
        self._total_s: float | None = None
        self._began_s, self._is_logged = time.monotonic(), False

    def to_the_end(self) -> None:
        """Read until the program has ended, and judge its end."""
        ended_s: float | None = None
        while True:
            chunk = self._child.read(POLL_S)
            now_s = time.monotonic()
            self._took(chunk, now_s)
            if self._child.exit_code is None:
                self._check_pace(now_s)
                continue
            ended_s = now_s if ended_s is None else ended_s
            drain_s = 0.0 if self._child.exit_code else DRAIN_S
            if not self._child.is_open or (not chunk and now_s - ended_s > drain_s):
                break
            if now_s - ended_s > 2 * DRAIN_S:
                break  # a process that was abandoned floods the output
        self._end(time.monotonic())

    def _took(self, chunk: bytes, now_s: float) -> None:
        if chunk:
            self._kept.write(chunk)
        for line in self._printed.feed(chunk):
            self._printed_line(line, now_s)
        for line in self._of_file(is_over=False):
            self._read_line(line, now_s)

    def _printed_line(self, line: str, now_s: float) -> None:
        if line.strip():
            self._last_line = line.strip()
        self._pace.printed(now_s)
        if self._file is None:
            self._read_line(line, now_s)

    def _of_file(self, *, is_over: bool) -> Iterator[str]:
        """Yield the new lines of the file that the program writes; it is read again if it becomes shorter."""
        if self._file is None or not self._is_reading:
            return
        with suppress(OSError), self._file.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                self._offset += len(chunk)
                yield from self._lines.feed(chunk)
        if is_over:
            yield from self._lines.finish()

    def _read_line(self, line: str, now_s: float) -> None:
        if not self._is_reading:
            return
        with self._reading():
            reported = self._reader.read(line)
            if reported is not None:
                self._record(reported, now_s)

    def _reading(self) -> "_Counting":
        return _Counting(self)

    def count_unreadable(self, reason: str) -> None:
        """Count a damaged record; the first one is logged."""
        self._unreadable += 1
        self._first_unreadable = self._first_unreadable or reason[:200]

    def _record(self, reported: Reported, now_s: float) -> None:
        self._pace.reported(now_s)
        self._total_s = reported.total_time_s if reported.total_time_s is not None else self._total_s
        self._recorder.record(reported, now_s)

    def _check_pace(self, now_s: float) -> None:
        """Raise BenchError if the program has stalled; `jobs.ranks.watchdog` does the same for our own engines."""
        limit = self._pace.exceeded(now_s) if self._is_reading else None
        if limit is None:
            return
        silent_s, usual_s, silence = limit
        raise BenchError(
            f"no progress for {silent_s:,.0f} s in training after {self._recorder.place} (usual: {usual_s:.3g} s): "
            f"the program {silence}; {self._child.state()}; its last line: {self._last_line:.200}",
            where=f"{node_name()}, engine.command",
            fix="to see where the program waits, run `py-spy dump --pid PID` while it hangs; if such long pauses are "
            "normal, raise launch.stall.factor or launch.stall.floor_s",
            rule="RUN-17",
        )

    def _end(self, now_s: float) -> None:
        """Judge how the program ended, and finish the log.

        Raises:
            BenchError: it failed, left processes behind, or printed nothing that its adapter can read.
        """
        code = self._child.exit_code
        for line in self._printed.finish():
            self._printed_line(line, now_s)
        for line in self._of_file(is_over=True):
            self._read_line(line, now_s)
        self._require_success(code)
        if self._is_reading:
            with self._reading():
                if (reported := self._reader.finished()) is not None:
                    self._record(reported, now_s)
        self._kept.finish()
        if left := self._child.left():
            raise BenchError(
                f"the program ended, but some of its processes still run: {', '.join(left[:8])}",
                where=f"{node_name()}, engine.command.argv",
                fix="let the program wait for its processes (`wait` in a shell script), because runstop neither times "
                "nor checks work in the background",
                rule="RUN-22",
            )
        if self._is_reading:
            self.log_output()
            self._recorder.finish()

    def _require_success(self, code: int | None) -> None:
        if not code:
            return
        self._kept.finish()
        how = f"exit code {code}" if code > 0 else f"signal {-code} ({signal.strsignal(-code)})"
        raise BenchError(
            f"the program of rank {self._begun.who.rank} ended with {how}; its last line: {self._last_line:.200}",
            where=f"{node_name()}, engine.command.argv",
            fix="read the last lines of the program in rank_logs/; exit code 127 means that a program was not found",
            rule="RUN-20",
        )

    def keep_rest(self) -> None:
        """Keep what the program printed while it was ended."""
        while chunk := self._child.read(0):
            self._kept.write(chunk)
        self._kept.finish()

    def log_output(self) -> None:
        """Log once what the program printed, how it ended, and its own time of the whole training."""
        if self._is_logged:
            return
        self._is_logged = True
        own = {} if self._total_s is None else {mllog.BY_PROGRAM: {"total_time_s": self._total_s}}
        self._begun.log.event(
            mllog.PROGRAM_OUTPUT,
            self._child.exit_code,
            lines=self._printed.num_lines,
            bytes=self._kept.num_bytes,
            not_kept_bytes=self._kept.num_dropped,
            unreadable=self._unreadable,
            first_unreadable=self._first_unreadable,
            runner_s=round(time.monotonic() - self._began_s, 3),
            **own,
        )


class _Counting:
    """Counts damaged records instead of raising: one half line must not end a run, but its log shows it."""

    def __init__(self, followed: RunningProgram) -> None:
        self._followed = followed

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Unreadable):
            return False
        self._followed.count_unreadable(str(error))
        return True


def _reads_output(program: Program) -> bool:
    """Return whether the adapter reads the output; hf_trainer reads its file only at the end."""
    return program.file is None or program.adapter is Adapter.hf_trainer


class Pace:
    """Finds stalls by the usual pause between two reports of the program; without two pauses there is no limit."""

    def __init__(self, stall: Stall | None) -> None:
        self._stall = stall
        self._pauses_s: deque[float] = deque(maxlen=WINDOW)
        self._reported_s: float | None = None
        self._printed_s = 0.0

    def printed(self, now_s: float) -> None:
        self._printed_s = now_s

    def reported(self, now_s: float) -> None:
        """Record that the program reported a step, an evaluation or a record."""
        if self._reported_s is not None:
            self._pauses_s.append(now_s - self._reported_s)
        self._reported_s = self._printed_s = now_s

    def exceeded(self, now_s: float) -> tuple[float, float, str] | None:
        """Return the seconds of silence, the usual pause and what happened; None for no stall."""
        if self._stall is None or self._reported_s is None or len(self._pauses_s) < FEWEST:
            return None
        usual_s = median(self._pauses_s)
        limit_s = self._stall.limit_s(usual_s)
        if now_s - self._printed_s > limit_s:
            return now_s - self._printed_s, usual_s, "printed nothing"
        if now_s - self._reported_s > ONLY_LINES * limit_s:
            return now_s - self._reported_s, usual_s, "printed lines, but none of them is a step or an evaluation"
        return None


if __name__ == "__main__":
    main()
