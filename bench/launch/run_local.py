"""Drive a plan's commands from here, on this machine or hosts: prepare, train and judge each trial, write it down."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import backends, preflight
from bench.backends import run_lock
from bench.backends.local import master_port
from bench.backends.nodes import lead
from bench.backends.nodes.lead import Nodes, require_prepared
from bench.console import sheet
from bench.console import trial as trial_sheets
from bench.contract import checkpoint, plan_paths, run_files
from bench.contract import plan as plans
from bench.contract.plan import Command, Plan, Trial
from bench.contract.run_files import STATUS
from bench.errors import BenchError, Stopped, with_rule, written
from bench.preflight import nodes as node_checks
from bench.report import kinds
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs import trial as trials
from bench.runs.folder import short
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status
from bench.watch import follow, sources, trackers
from bench.watch.hardware import Gpus

if TYPE_CHECKING:
    from bench.console.sheet import Messages


def run(plan: Plan, folder: Path) -> int:
    """Return 0 when every trial's log proves that it did what was asked, 1 when one does not.

    A run that goes on keeps what it has proven; its other trials get another attempt.

    Raises:
        BenchError: a rank failed, or the folder cannot be written; finished trials are kept.
    """
    console = sheet.to_stderr()
    console.print(
        f"{plan.config.task.summary}\n{plan.name} on {plan.world.num_ranks} ranks, results in {short(folder)}"
    )
    with run_lock.driving(folder):
        with written(folder), ledger.reopened(folder):
            pass  # all of it, or nothing; a new run has nothing to reopen
        return _driven(plan, folder, console)


def _driven(plan: Plan, folder: Path, console: "Messages") -> int:
    """Run what is left of the plan; whatever happens, status.json says it."""
    status = Status(outcome=Ending.failed, exit_code=1)
    try:
        ledger.create(folder, plan)
        here = backends.of(plan)
        assert isinstance(here, backends.Here), here
        with here.nodes(plan, folder) as nodes:
            proven = _work(nodes, folder, console)
        status = Status(outcome=Ending.proven if proven else Ending.not_proven, exit_code=0 if proven else 1)
    except Stopped as stop:
        status = Status(outcome=Ending.interrupted, exit_code=stop.exit_code)
        console.print(f"stopped; what was finished is in {short(folder)}")
        raise
    except BenchError as error:
        status = Status(
            outcome=Ending.failed, exit_code=error.exit_code, rule=error.rule, what=error.what, fix=error.fix
        )
        raise
    except OSError as error:
        what, fix = f"cannot write: {error.strerror}", "make room, or set LOGDIR"
        status = Status(outcome=Ending.failed, exit_code=1, rule="CFG-08", what=what, fix=fix)
        raise BenchError(what, where=str(error.filename or folder), fix=fix, rule="CFG-08") from error
    finally:
        try:
            statuses.write(folder, status)
            manifest.write(folder)
        except OSError as error:
            console.print(with_rule("CFG-08", f"{STATUS} cannot be written: {error.strerror}"), markup=False)
        if words := _next(plan, folder, status.exit_code):
            console.print(words)
    return status.exit_code


def _next(plan: Plan, folder: Path, exit_code: int) -> str:
    """Return what one would type next; nothing for one trial, whose result is on the screen."""
    if exit_code:
        words = f"to have it explained: python -m bench why {short(folder)}"
        if any(checkpoint.newest(folder, trial.index) for trial in plan.trials):
            words += f"\nto go on from the last checkpoint: python -m bench resume {short(folder)}"
        return words
    return kinds.of(plan.kind).next_step(plan, short(folder))


def _work(nodes: Nodes, folder: Path, console: "Messages") -> bool:
    """Run the plan's commands; return whether every trial is proven."""
    plan = nodes.plan
    for command in plan.commands[: len(plan.commands) - len(plan.trials)]:
        if command.name != plans.PREPARE:
            _look(nodes, command, folder, console)
    prepare = plans.command(plan, plans.PREPARE)
    if prepare is None:
        console.print("nothing to prepare")
    elif plan_paths.is_prepared(plan):
        console.print("prepared before: rows and base checkpoint are there")
    else:
        console.print("preparing (not timed): rows, then the base checkpoint")
        _follow(nodes, prepare, folder, console)
    require_prepared(nodes)
    for trial, command in zip(plan.trials, plans.trial_commands(plan), strict=True):
        _trial(nodes, trial, command, folder, console)
    return all(entry.outcome is Outcome.proven for entry in ledger.read(folder))


def _look(nodes: Nodes, command: Command, folder: Path, console: "Messages") -> None:
    """Look at the nodes, or measure them; an error ends the run before it costs anything."""
    console.print(f"{command.name}: {len(nodes.names)} nodes, {', '.join(nodes.names)}", markup=False)
    for old in (folder / run_files.FACTS).glob("rank_*.json") if command.name == plans.NODE_FACTS else ():
        old.unlink()
    with lead.started(nodes, command, folder, port=master_port(nodes.plan)) as ranks:
        while ranks.are_running():
            pass
    ranks.check()
    if command.name == plans.NODE_FACTS:
        findings = node_checks.judge(nodes.plan, node_checks.load(folder))
        for finding in findings:
            console.print(str(finding), markup=False)
        if not nodes.plan.config.launch.force:
            preflight.require(findings)


def _trial(nodes: Nodes, trial: Trial, command: Command, folder: Path, console: "Messages") -> None:
    """Run and judge a trial, unless its result is there already."""
    plan = nodes.plan
    trials.settle(folder, plan, trial)
    if not ledger.begin(folder, trial, attempts=1, job=f"{socket.gethostname()}-{os.getpid()}"):
        console.print(f"trial {trial.index}, seed {trial.seed}: was finished before")
        return
    try:
        _follow(nodes, command, folder, console)
    except BaseException as error:
        trials.close(folder, plan, trial, failed=True)
        if isinstance(error, BenchError) and error.rule == "CFG-05":  # the ranks found a log; this says whose it is
            trials.require_own(folder, trial)
        raise
    judged = trials.close(folder, plan, trial, failed=False)
    assert judged is not None
    trial_sheets.show(folder, trial, judged)


def _follow(nodes: Nodes, command: Command, folder: Path, console: "Messages") -> None:
    """Run a command, and show how far its log has come."""
    assert command.log is not None  # or there is nothing to follow
    plan, is_trial = nodes.plan, command.name != plans.PREPARE
    with lead.started(nodes, command, folder, port=master_port(plan)) as ranks:
        expected = sources.planned(plan, command)
        log, is_alive = folder / command.log, ranks.are_running
        more: dict[str, Any] = {}
        if is_trial:
            more["curves"] = trackers.curves(plan, folder, trial=log.stem)
            more["gpus"] = Gpus(folder, plans.trial_commands(plan).index(command))
        follow(log, expected, name=command.name, is_alive=is_alive, console=console, **more)
    ranks.check()
