"""Run a plan from this process, on this machine or on ssh hosts, and show its progress."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import backends, hints
from bench.backends import run_lock
from bench.backends.nodes.lead import Nodes
from bench.backends.protocol import InProcess
from bench.console import sheet
from bench.console import trial as trial_tables
from bench.contract import checkpoint, regular_files
from bench.contract import plan as plans
from bench.contract.plan import Command, Plan, Trial
from bench.driver.drive import Drive, drive
from bench.errors import BenchError, Stopped, written
from bench.report import kinds
from bench.results.kind import Judged
from bench.runs import ledger
from bench.runs.folder import short
from bench.texts import counted
from bench.watch import follow, sources, trackers
from bench.watch.hardware import Gpus

if TYPE_CHECKING:
    from bench.console.sheet import Messages


@dataclass(frozen=True, slots=True)
class Screen:
    """Show the progress of a run on the user's terminal."""

    folder: Path
    console: "Messages"

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def failed(self, error: BenchError) -> None:
        hints.print_error(error)

    def follow(self, nodes: Nodes, command: Command, is_running: Callable[[], bool]) -> None:
        """Show a command's progress from its log; commands without a log show none."""
        if command.log is None:
            while is_running():
                pass
            return
        plan, log, more = nodes.plan, self.folder / command.log, dict[str, Any]()
        if command.name != plans.PREPARE:
            more["curves"] = trackers.curves(plan, self.folder, trial=log.stem)
            more["gpus"] = Gpus(self.folder, plans.trial_commands(plan).index(command))
        expected = sources.planned(plan, command)
        follow(log, expected, name=command.name, is_alive=is_running, console=self.console, **more)

    def judged(self, trial: Trial, judged: Judged) -> None:
        trial_tables.show(self.folder, trial, judged)


def run(plan: Plan, folder: Path) -> int:
    """Return 0 if every trial is valid, else 1 or 2.

    A resumed run keeps its valid trials; its other trials get another attempt.

    Raises:
        ConfigError: another process is driving the run.
        Stopped: a signal ends this process; finished trials are kept.
    """
    console = sheet.to_stderr()
    console.print(
        f"{plan.config.task.summary}\n"
        f"{plan.name} on {counted(plan.world.num_ranks, 'rank')}, results in {short(folder)}"
    )
    backend = backends.for_plan(plan)
    assert isinstance(backend, InProcess), backend
    with _kept_from_others(), run_lock.driving(folder):
        with written(folder), ledger.reopened(folder):
            pass  # all or nothing; a new run has nothing to reopen
        driven = Drive(
            folder=folder,
            plan=plan,
            progress=Screen(folder, console),
            job=f"{socket.gethostname()}-{os.getpid()}",
        )
        try:
            code = drive(driven, lambda: backend.nodes(plan, folder))
        except Stopped as stop:
            console.print(f"stopped; finished trials are in {short(folder)}")
            console.print(_next_commands(plan, folder, stop.exit_code))
            raise
    if hints := _next_commands(plan, folder, code):
        console.print(hints)
    return code


@contextmanager
def _kept_from_others() -> Iterator[None]:
    """Give files that this process and its ranks create in the block to this user alone."""
    before = regular_files.keep_others_from_writing()
    try:
        yield
    finally:
        os.umask(before)


def _next_commands(plan: Plan, folder: Path, exit_code: int) -> str:
    """Return suggested next commands; empty for a single valid trial, whose result is already shown."""
    if not exit_code:
        return kinds.report_of(plan.kind).next_step(plan, short(folder))
    hints = f"to see why: runstop why {short(folder)}"
    if any(checkpoint.newest(folder, trial.index) for trial in plan.trials):
        hints += f"\nto continue from the last checkpoint: runstop resume {short(folder)}"
    return hints
