"""Drive the commands of a plan, one after another, wherever no srun does: this machine, hosts, pods, Ray's nodes.

It keeps the ledger, judges each trial and writes the final status, in the order and with the endings of a batch script
(job.sh). What it does it tells a `Progress`: the screen of whoever launched the run, or the output of a node.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.backends.local import master_port
from bench.backends.nodes import lead
from bench.backends.nodes.interruption import START_AGAIN, STOPPED, TIME_IS_NEAR, CutShortError, NodeLostError
from bench.backends.nodes.lead import Nodes, Running, require_prepared
from bench.contract import plan as plans
from bench.contract import plan_paths, run_files
from bench.contract.plan import Command, Plan, Trial
from bench.driver import between_commands
from bench.errors import BenchError, Stopped, exit_code_of, with_rule
from bench.results.kind import Judged
from bench.runs import manifest
from bench.runs import status as statuses
from bench.runs import trial as trials
from bench.runs.status import Ending, Status

RESERVE_BYTES = 2**18
LEAST_FREE_BYTES = 2**20
IN_STATUS = ("SLU-07", "RUN-02")
"""What the driver sees, and no rank's own log says: time is up, a signal. `why` finds all else in the logs."""
SETTLE_S = 3.0
"""Where a whole job is told to end, other nodes may hear of it so much earlier than this one."""
FINAL_CODES = (1, 2)
"""The exit codes of a run that has failed: by its work, or by its request. How ranks ended is in their accounts."""


class Progress(Protocol):
    """Who is told what a run does."""

    def say(self, text: str) -> None:
        """Take one line of plain text."""

    def failed(self, error: BenchError) -> None:
        """Take an error that ends the run."""

    def follow(self, nodes: Nodes, command: Command, is_running: Callable[[], bool]) -> None:
        """Show a command until its ranks do not run any more; `is_running` says so, after a moment."""

    def judged(self, trial: Trial, judged: Judged) -> None:
        """Show what a trial is worth."""


class FailedError(Exception):
    """A command has failed, which ends the run."""

    def __init__(self, exit_code: int, what: str) -> None:
        super().__init__(what)
        self.exit_code, self.what = exit_code, what


@dataclass(slots=True, kw_only=True)
class Drive:
    """A run under way."""

    folder: Path
    plan: Plan
    progress: Progress
    job: str
    """What the ledger calls this start of the run."""
    noted_job: str | None = None
    """The id by which a backend knows it; None where no backend does."""
    check: Callable[[], None] = lambda: None
    """Called while the driver waits; raises CutShortError where the run must end."""
    restarts: bool = False
    """Whether somebody starts this process again where it ends with START_AGAIN."""
    made_progress: bool = False
    """Whether this start has done what the next one need not do again."""

    @property
    def trials(self) -> list[int]:
        return [trial.index for trial in self.plan.trials]


def drive(run: Drive, connect: Callable[[], AbstractContextManager[Nodes]]) -> int:
    """Return the exit code of the run: 0 once every trial is proven. `connect` holds the nodes for the run.

    Raises:
        Stopped: a signal ends this process; the status says so.
    """
    with suppress(OSError):  # room for the final status on a disk that fills up
        (run.folder / run_files.RESERVE).write_bytes(bytes(RESERVE_BYTES))
    try:
        between_commands.open_run(run.folder, run.plan, job=run.noted_job)
        run.check()
        with connect() as nodes:
            for command in run.plan.commands[: len(run.plan.commands) - len(run.plan.trials)]:
                _before_trials(run, nodes, command)
            if plans.command(run.plan, plans.PREPARE) is None:
                run.progress.say("nothing to prepare")
            for trial, command in zip(run.plan.trials, plans.trial_commands(run.plan), strict=True):
                _trial(run, nodes, trial, command)
    except FailedError as error:
        return _finish(run, error.exit_code, error.what)
    except CutShortError as error:
        return _cut_short(run, str(error), exit_code_of(-error.signum))
    except Stopped as stop:
        _cut_short(run, STOPPED, stop.exit_code)
        raise
    except NodeLostError as error:
        if not run.restarts:
            run.progress.failed(error)
        return _node_lost(run, with_rule(error.rule, error.what))
    except BenchError as error:
        run.progress.failed(error)
        return _finish(run, error.exit_code, with_rule(error.rule, error.what))
    except OSError as error:
        failed = BenchError(
            f"cannot write: {error.strerror}",
            where=str(error.filename or run.folder),
            fix="make room, or set LOGDIR",
            rule="CFG-08",
        )
        run.progress.failed(failed)
        return _finish(run, 1, with_rule(failed.rule, failed.what))
    except BaseException:
        _finish(run, 1, "the driver of the run failed")
        raise
    return _finish(run, 0, "every trial ended")


def _before_trials(run: Drive, nodes: Nodes, command: Command) -> None:
    """Run what the plan has before its trials."""
    match command.name:
        case plans.PREPARE:
            _prepare(run, nodes, command)
        case plans.NODE_FACTS:
            for old in (run.folder / run_files.FACTS).glob("rank_*.json"):  # an earlier start's
                old.unlink()
            _on_all_nodes(run, nodes, command)
            between_commands.check_nodes(run.folder, run.plan, say=run.progress.say)
        case _:
            _on_all_nodes(run, nodes, command)


def _prepare(run: Drive, nodes: Nodes, command: Command) -> None:
    """Make what is not there yet; afterwards every node must have it, at the same path."""
    if plan_paths.is_prepared(run.plan):
        run.progress.say("prepared before: rows and base checkpoint are there")
    else:
        run.progress.say("preparing (not timed): rows, then the base checkpoint")
        _run(run, nodes, command)
        run.made_progress = True
    require_prepared(nodes, run.check)


def _on_all_nodes(run: Drive, nodes: Nodes, command: Command) -> None:
    run.progress.say(f"{command.name}: {len(nodes.names)} nodes, {', '.join(nodes.names)}")
    _run(run, nodes, command)


def _trial(run: Drive, nodes: Nodes, trial: Trial, command: Command) -> None:
    """Run and judge a trial, unless its result is known."""
    run.check()
    names = ",".join(nodes.names)
    if not between_commands.begin_trial(run.folder, run.plan, trial, job=run.job, nodes=names):
        run.progress.say(f"trial {trial.index}, seed {trial.seed}: was finished before")
        return
    run.progress.say(f"trial {trial.index}, seed {trial.seed}: begins")
    if words := run.plan.config.cluster.drop_caches:
        lines = nodes.drop_caches(words.split(), check=run.check)
        (run.folder / run_files.caches(trial.index)).write_text("".join(f"{line}\n" for line in lines))
    try:
        _run(run, nodes, command)
    except FailedError:
        trials.require_own(run.folder, trial)  # where the ranks found a log, this says whose it is
        raise
    run.made_progress = True
    run.progress.judged(trial, between_commands.judge_trial(run.folder, run.plan, trial))
    run.check()


def _run(run: Drive, nodes: Nodes, command: Command) -> None:
    """Run a command on every rank of every node.

    Raises:
        FailedError: a rank failed, or its time was up.
        NodeLostError: a node is gone, which explains how the ranks ended.
    """
    with lead.started(nodes, command, run.folder, port=master_port(run.plan)) as ranks:
        run.progress.follow(nodes, command, lambda: _is_running(run, ranks))
    try:
        ranks.check()
    except NodeLostError:
        raise
    except BenchError as error:
        run.progress.failed(error)
        what = with_rule(error.rule, error.what) if error.rule in IN_STATUS else f"{command.name} failed"
        raise FailedError(error.exit_code if error.exit_code in FINAL_CODES else 1, what) from None


def _is_running(run: Drive, ranks: Running) -> bool:
    run.check()
    return ranks.are_running()


def _node_lost(run: Drive, why: str) -> int:
    """End a run that has lost a node; somebody may start it again, unless this node is told to end as well."""
    until_s = time.monotonic() + SETTLE_S
    try:
        while run.restarts and time.monotonic() < until_s:
            run.check()
            time.sleep(0.1)
    except CutShortError as error:
        return _cut_short(run, str(error), exit_code_of(-error.signum))
    return _cut_short(run, why, START_AGAIN)


def _cut_short(run: Drive, why: str, exit_code: int) -> int:
    """End before the work is done; whoever restarts runs starts it again, unless somebody stopped it."""
    run.progress.say(f"{time.strftime('%F %T')} {why}")
    if why == TIME_IS_NEAR and not run.made_progress:
        return _finish(run, 1, f"{why}, and this start of the run has finished nothing")
    with suppress(OSError):  # for the ledger: the next attempt sets aside what this one left
        (run.folder / run_files.interrupted()).write_text(f"{why}\n")
    if why == STOPPED:
        with suppress(OSError, BenchError):
            (run.folder / run_files.RESERVE).unlink(missing_ok=True)
            between_commands.abort_trials(run.folder, run.plan, run.trials)
        rule, _, what = why.partition(": ")
        fix = f"python -m bench resume {run.folder} goes on with it"
        status = Status(outcome=Ending.interrupted, exit_code=exit_code, rule=rule, what=what, fix=fix)
        statuses.write(run.folder, status)
        with suppress(OSError):
            manifest.write(run.folder)
        return exit_code
    return START_AGAIN if run.restarts else _finish(run, 1, why)


def _finish(run: Drive, exit_code: int, what: str) -> int:
    """Write the final status; that nothing failed is not yet success, which the ledger must prove."""
    if shutil.disk_usage(run.folder).free <= LEAST_FREE_BYTES:
        what = with_rule("CFG-08", f"no space left for results: {what}")
    with suppress(OSError):
        (run.folder / run_files.RESERVE).unlink(missing_ok=True)
    try:
        code = between_commands.close_run(run.folder, run.plan, exit_code=exit_code, what=what, of_job=run.trials)
        return exit_code or code
    except OSError as error:
        run.progress.say(with_rule("CFG-08", f"{run_files.STATUS} cannot be written: {error.strerror}"))
    except BenchError as error:
        run.progress.failed(error)
    return exit_code or 1
