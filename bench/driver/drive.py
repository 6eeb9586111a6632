"""Run the commands of a plan one after another without srun: on this machine, ssh hosts, Kubernetes pods, Ray nodes.

The driver keeps the ledger, judges each trial and writes the final status, as Slurm's batch script does (job.sh). It
reports to a `Progress`: the terminal of the user, or the output of a node.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from bench.backends.local import master_port
from bench.backends.nodes import lead
from bench.backends.nodes.interruption import RESTART_EXIT_CODE, STOPPED, TIME_IS_NEAR, CutShortError, NodeLostError
from bench.backends.nodes.lead import Nodes, Running, require_prepared
from bench.contract import atomic_files, plan_paths, run_files
from bench.contract import plan as plans
from bench.contract.plan import Command, Plan, Trial
from bench.contract.schema import BackendName
from bench.driver import between_commands, slow_nodes
from bench.errors import FINAL_CODES, BenchError, Stopped, exit_code_of, with_rule
from bench.results.kind import Judged
from bench.runs import ledger, manifest
from bench.runs import status as statuses
from bench.runs import trial as trials
from bench.runs.status import Ending, Status

RESERVE_BYTES = 2**18
LEAST_FREE_BYTES = 2**20
IN_STATUS = ("SLU-07", "RUN-02")
"""Rules that only the driver can detect (time limit, signal). `why` finds all others in the logs."""
SETTLE_S = 3.0
"""When a whole job is stopped, other nodes may get the signal this much earlier than this node."""
STOPPED_HERE = with_rule("RUN-24", "the run was stopped by Ctrl-C, `runstop cancel` or another signal")
"""What a signal means without a queue: no job was cancelled."""
KILLED = {
    BackendName.kubernetes: with_rule("KUB-18", "the pod of node 0 got a signal: it was deleted, evicted or preempted"),
    BackendName.ray: with_rule("RAY-08", "the job's driver, or its worker on node 0, has ended"),
}
"""What a signal means where `runstop cancel` leaves a note in job.json, if there is none."""


class Progress(Protocol):
    """Receives the progress of a run."""

    def say(self, text: str) -> None:
        """Show one line of plain text."""

    def failed(self, error: BenchError) -> None:
        """Show an error that ends the run."""

    def follow(self, nodes: Nodes, command: Command, is_running: Callable[[], bool]) -> None:
        """Show a command until its ranks have ended; each call of `is_running` waits a moment."""

    def judged(self, trial: Trial, judged: Judged) -> None:
        """Show the result of a trial."""


class FailedError(Exception):
    """A failed command ends the run."""

    def __init__(self, exit_code: int, what: str, *, command: str = "", killed_on: str | None = None) -> None:
        """`killed_on` names the node on which a rank was killed (SIGKILL)."""
        super().__init__(what)
        self.exit_code, self.what, self.command, self.killed_on = exit_code, what, command, killed_on


class PortInUseError(FailedError):
    """Another program took the port of rank 0 after it was chosen."""


@dataclass(slots=True, kw_only=True)
class Drive:
    """A run in progress."""

    folder: Path
    plan: Plan
    progress: Progress
    job: str
    """The id of this start of the run in the ledger."""
    backend_job_id: str | None = None
    """The backend's id of the job; None without a backend."""
    check: Callable[[], None] = lambda: None
    """Called while the driver waits; raises CutShortError if the run must end."""
    restarts: bool = False
    """Whether the backend restarts this process after RESTART_EXIT_CODE."""
    made_progress: bool = False
    """Whether this start has finished work that the next start need not repeat."""

    @property
    def trials(self) -> list[int]:
        return [trial.index for trial in self.plan.trials]


def drive(run: Drive, connect: Callable[[], AbstractContextManager[Nodes]]) -> int:
    """Return the exit code of the run: 0 once every trial is valid. `connect` holds the nodes for the run.

    Raises:
        Stopped: a signal ends this process; status.json is written first.
    """
    with suppress(OSError):  # reserves space for the final status if the disk fills up
        (run.folder / run_files.DISK_RESERVE).write_bytes(bytes(RESERVE_BYTES))
    try:
        between_commands.open_run(run.folder, run.plan, job=run.backend_job_id)
        run.check()
        with connect() as nodes:
            for command in run.plan.commands[: len(run.plan.commands) - len(run.plan.trials)]:
                _with_other_ports(run, partial(_before_trials, run, nodes, command))
            if plans.command(run.plan, plans.PREPARE) is None:
                run.progress.say("nothing to prepare")
            for trial, command in zip(run.plan.trials, plans.trial_commands(run.plan), strict=True):
                _with_other_ports(run, partial(_trial, run, nodes, trial, command))
    except FailedError as error:
        if (why := _left_out(run, error)) is not None:
            return _stop_early(run, f"{why}; the next attempt uses a spare node", RESTART_EXIT_CODE)
        return _finish(run, error.exit_code, error.what)
    except CutShortError as error:
        return _stop_early(run, str(error), exit_code_of(-error.signum))
    except Stopped as stop:
        _stop_early(run, STOPPED, stop.exit_code)
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
            fix="free disk space, or set LOGDIR to another disk",
            rule="CFG-08",
        )
        run.progress.failed(failed)
        return _finish(run, 1, with_rule(failed.rule, failed.what))
    except BaseException:
        _finish(run, 1, "the driver failed")
        raise
    return _finish(run, 0, "every trial ended")


def _left_out(run: Drive, error: FailedError) -> str | None:
    """Leave out the node that caused a failure, if the backend has a spare node for the next attempt; return why."""
    if not run.restarts:
        return None
    return slow_nodes.leave_out(
        run.folder, job=run.job, is_check=error.command == plans.NODE_CHECK, killed_on=error.killed_on
    )


def _with_other_ports(run: Drive, act: Callable[[], None]) -> None:
    """Run ranks, and run them again if their port is in use: each start chooses another port."""
    for _ in range(run_files.PORT_TRIES - 1):
        try:
            return act()
        except PortInUseError as error:
            run.progress.say(f"{error.what}; trying another port")
    return act()


def _before_trials(run: Drive, nodes: Nodes, command: Command) -> None:
    """Run a command that the plan has before its trials."""
    match command.name:
        case plans.PREPARE:
            _prepare(run, nodes, command)
        case plans.NODE_FACTS:
            for old in (run.folder / run_files.FACTS).glob("rank_*.json"):  # from an earlier start
                old.unlink()
            _on_all_nodes(run, nodes, command)
            between_commands.check_nodes(run.folder, run.plan, say=run.progress.say)
        case _:
            _on_all_nodes(run, nodes, command)


def _prepare(run: Drive, nodes: Nodes, command: Command) -> None:
    """Create rows and base checkpoint if they are missing; every node must then see them at the same path."""
    if plan_paths.is_prepared(run.plan):
        run.progress.say("already prepared: rows and base checkpoint exist")
    else:
        run.progress.say("preparing (not timed): rows, then the base checkpoint")
        _run(run, nodes, command)
        run.made_progress = True
    require_prepared(nodes, run.check)


def _on_all_nodes(run: Drive, nodes: Nodes, command: Command) -> None:
    run.progress.say(f"{command.name}: {len(nodes.names)} nodes, {', '.join(nodes.names)}")
    _run(run, nodes, command)


def _trial(run: Drive, nodes: Nodes, trial: Trial, command: Command) -> None:
    """Run and judge a trial, unless it already has its result."""
    run.check()
    names = ",".join(nodes.names)
    attempt = ledger.new_nonce()
    if not between_commands.begin_trial(run.folder, run.plan, trial, job=run.job, nodes=names, nonce=attempt):
        run.progress.say(f"trial {trial.index}, seed {trial.seed}: already finished")
        return
    run.progress.say(f"trial {trial.index}, seed {trial.seed}: starts")
    if words := run.plan.config.cluster.drop_caches:
        lines = nodes.drop_caches(words.split(), check=run.check)
        (run.folder / run_files.caches(trial.index)).write_text("".join(f"{line}\n" for line in lines))
    (run.folder / run_files.SLOW_NODE).unlink(missing_ok=True)
    try:
        _run(run, nodes, command, attempt)
    except PortInUseError as error:
        (run.folder / run_files.interrupted()).write_text(f"{error.what}\n")  # for the ledger
        raise
    except FailedError:
        trials.require_own(run.folder, trial)  # if another run wrote the log, report that instead
        raise
    run.made_progress = True
    run.progress.judged(trial, between_commands.judge_trial(run.folder, run.plan, trial))
    run.check()


def _run(run: Drive, nodes: Nodes, command: Command, attempt: str | None = None) -> None:
    """Run a command on every rank of every node.

    Raises:
        FailedError: a rank failed, or the time limit was reached.
        NodeLostError: the connection to a node was lost, which explains how the ranks ended.
    """
    with lead.started(nodes, command, run.folder, port=master_port(run.plan), attempt=attempt) as ranks:
        run.progress.follow(nodes, command, lambda: _is_running(run, ranks))
    try:
        ranks.check()
    except NodeLostError:
        raise
    except BenchError as error:
        is_chosen_here = run.plan.config.cluster.master_port is None
        if is_chosen_here and error.rule == "NCC-05" and run_files.PORT_IN_USE in error.what:
            raise PortInUseError(1, with_rule(error.rule, error.what)) from None
        run.progress.failed(error)
        what = with_rule(error.rule, error.what) if error.rule in IN_STATUS else f"{command.name} failed"
        raise FailedError(
            error.exit_code if error.exit_code in FINAL_CODES else 1,
            what,
            command=command.name,
            killed_on=next((nodes.names[rank // run.plan.world.ranks_per_node] for rank in ranks.killed()), None),
        ) from None


def _is_running(run: Drive, ranks: Running) -> bool:
    run.check()
    return ranks.are_running()


def _node_lost(run: Drive, why: str) -> int:
    """End a run that has lost a node. It may be restarted, unless this node gets a signal to end, too."""
    until_s = time.monotonic() + SETTLE_S
    try:
        while run.restarts and time.monotonic() < until_s:
            run.check()
            time.sleep(0.1)
    except CutShortError as error:
        return _stop_early(run, str(error), exit_code_of(-error.signum))
    return _stop_early(run, why, RESTART_EXIT_CODE)


def _stop_early(run: Drive, why: str, exit_code: int) -> int:
    """End before the work is done; the backend may restart the run, unless the user stopped it."""
    is_stopped, is_queued = why == STOPPED, (run.folder / run_files.JOB).exists()
    if is_stopped and atomic_files.read_object(run.folder / run_files.JOB).get(run_files.CANCELLED) != run.job:
        why = KILLED.get(run.plan.config.cluster.backend, why)
    is_of_user = why == STOPPED
    if is_of_user and not is_queued:
        why = STOPPED_HERE
    run.progress.say(f"{time.strftime('%F %T')} {why}")
    if why == TIME_IS_NEAR and not run.made_progress:
        return _finish(
            run, 1, f"{why}, and this start of the run has finished nothing: neither its preparation nor a trial"
        )
    with suppress(OSError):  # for the ledger, which then moves the files of this attempt to attempts/
        (run.folder / run_files.interrupted()).write_text(f"{why}\n")
    if is_stopped:
        with suppress(OSError, BenchError):
            (run.folder / run_files.DISK_RESERVE).unlink(missing_ok=True)
            if is_of_user:  # else the next start of the run records the attempt as interrupted, with its cause
                between_commands.abort_trials(run.folder, run.plan, run.trials)
        rule, _, what = why.partition(": ")
        fix = "to continue: runstop resume RUN"
        status = Status(outcome=Ending.interrupted, exit_code=exit_code, rule=rule, what=what, fix=fix)
        statuses.write(run.folder, status)
        with suppress(OSError):
            manifest.write(run.folder)
        return exit_code
    return RESTART_EXIT_CODE if run.restarts else _finish(run, 1, why)


def _finish(run: Drive, exit_code: int, what: str) -> int:
    """Write the final status; success also needs a ledger in which every trial is valid."""
    if shutil.disk_usage(run.folder).free <= LEAST_FREE_BYTES:
        what = with_rule("CFG-08", f"no space left for results: {what}")
    with suppress(OSError):
        (run.folder / run_files.DISK_RESERVE).unlink(missing_ok=True)
    try:
        code = between_commands.close_run(run.folder, run.plan, exit_code=exit_code, what=what, of_job=run.trials)
        return exit_code or code
    except OSError as error:
        run.progress.say(with_rule("CFG-08", f"cannot write {run_files.STATUS}: {error.strerror}"))
    except BenchError as error:
        run.progress.failed(error)
    return exit_code or 1
