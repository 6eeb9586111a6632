"""Run a plan from this process, on this machine or on hosts, and show how it goes."""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import backends, masking
from bench.backends import run_lock
from bench.backends.nodes.lead import Nodes
from bench.backends.protocol import Here
from bench.console import sheet
from bench.console import trial as trial_tables
from bench.contract import checkpoint
from bench.contract import plan as plans
from bench.contract.plan import Command, Plan, Trial
from bench.driver.drive import Drive, drive
from bench.errors import BenchError, Stopped, written
from bench.report import kinds
from bench.results.kind import Judged
from bench.runs import ledger
from bench.runs.folder import short
from bench.watch import follow, sources, trackers
from bench.watch.hardware import Gpus

if TYPE_CHECKING:
    from bench.console.sheet import Messages


@dataclass(frozen=True, slots=True)
class Screen:
    """The progress of a run on the terminal of whoever launched it."""

    folder: Path
    console: "Messages"

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def failed(self, error: BenchError) -> None:
        print(masking.masked(str(error)), file=sys.stderr)

    def follow(self, nodes: Nodes, command: Command, is_running: Callable[[], bool]) -> None:
        """Show how far the command's log has come; of a command without a log there is nothing to show."""
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
    """Return 0 when every trial's log proves that it did what was asked, 1 or 2 when one does not.

    A run that goes on keeps what it has proven; its other trials get another attempt.

    Raises:
        ConfigError: another process drives the run.
        Stopped: a signal ends this process; finished trials are kept.
    """
    console = sheet.to_stderr()
    console.print(
        f"{plan.config.task.summary}\n{plan.name} on {plan.world.num_ranks} ranks, results in {short(folder)}"
    )
    backend = backends.of(plan)
    assert isinstance(backend, Here), backend
    with run_lock.driving(folder):
        with written(folder), ledger.reopened(folder):
            pass  # all of it, or nothing; a new run has nothing to reopen
        driven = Drive(
            folder=folder,
            plan=plan,
            progress=Screen(folder, console),
            job=f"{socket.gethostname()}-{os.getpid()}",
        )
        try:
            code = drive(driven, lambda: backend.nodes(plan, folder))
        except Stopped as stop:
            console.print(f"stopped; what was finished is in {short(folder)}")
            console.print(_next(plan, folder, stop.exit_code))
            raise
    if words := _next(plan, folder, code):
        console.print(words)
    return code


def _next(plan: Plan, folder: Path, exit_code: int) -> str:
    """Return what one would type next; nothing for one trial, whose result is on the screen."""
    if not exit_code:
        return kinds.of(plan.kind).next_step(plan, short(folder))
    words = f"to have it explained: python -m bench why {short(folder)}"
    if any(checkpoint.newest(folder, trial.index) for trial in plan.trials):
        words += f"\nto go on from the last checkpoint: python -m bench resume {short(folder)}"
    return words
