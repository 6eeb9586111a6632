"""End a run, or go on with one that has ended, whatever runs it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench import backends
from bench.backends import JobState
from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.contract.run_files import LEDGER, PLAN
from bench.errors import ConfigError
from bench.runs import ledger
from bench.runs import run as runs
from bench.runs import status as statuses
from bench.runs.folder import short
from bench.runs.run import Run
from bench.runs.status import Ending, Status


def cancel(folder: Path) -> str:
    """Return the id of the job that is cancelled; what it finished is kept.

    Raises:
        ConfigError: the run has no job that could be cancelled.
        SubmitError: its backend refuses.
    """
    run = runs.find(folder)
    if not run.is_active:
        raise ConfigError(
            f"nothing to cancel: the run is {run.word}",
            where=str(folder),
            fix="python -m bench runs lists what goes on",
        )
    backends.get(run.backend).cancel(run.id)
    if all(job.state is JobState.queued for job in run.states):  # it has not started, so its script cannot say so
        status = Status(
            outcome=Ending.interrupted,
            exit_code=143,
            rule="SLU-08",
            what="the job was cancelled before it started",
            fix=f"python -m bench resume {short(folder)}",
        )
        statuses.write(folder, status)
    return run.id


def resume(folder: Path, *, walltime_min: int | None = None, arguments: Sequence[str] = ()) -> int:
    """Go on with a run: trials that are done stay, the others get another attempt; return the exit code.

    `walltime_min` is what each of these may take from now on; `arguments` are more for the backend's command, such as
    --exclude=dgx-7 for sbatch. Where there is no queue the run goes on here and now.

    Raises:
        ConfigError: it still has a job, or nothing is left to do.
        SubmitError: the backend refuses the job; the folder is then as it was.
    """
    run = runs.find(folder)
    _check_ended(run)
    match backends.get(run.backend):
        case backends.Queue() as queue:
            left = 1 if run.elements else sum(not outcome.is_result for outcome in run.outcomes) or 1
            with ledger.reopened(folder):
                job = queue.resume(folder, trials_left=left, walltime_min=walltime_min, arguments=arguments)
            print(f"job {job} goes on with {folder}")
            return 0
        case _:
            return _here(run, walltime_min=walltime_min, arguments=arguments)


def _check_ended(run: Run) -> None:
    if run.is_active:
        raise ConfigError(
            f"job {run.id} is {run.word}",
            where=str(run.folder),
            fix=f"wait for it, or python -m bench cancel {run.folder}",
        )
    if run.outcomes and all(outcome.is_result for outcome in run.outcomes):
        raise ConfigError(
            "every trial has its result, good or bad: there is nothing to go on with",
            where=str(run.folder / LEDGER),
            fix=f"python -m bench score {run.folder}",
        )


def _here(run: Run, *, walltime_min: int | None, arguments: Sequence[str]) -> int:
    """Drive the same plan again on this machine."""
    from bench.launch import run_local

    if arguments:
        raise ConfigError(
            f"{' '.join(arguments)} is for a queue, and backend {run.backend.name} has none",
            where="--sbatch",
            fix="leave it out",
        )
    plan = plans.load(run.folder / PLAN)
    ledger.reopen(run.folder)
    return run_local.run(_within(plan, walltime_min) if walltime_min else plan, run.folder)


def _within(plan: Plan, walltime_min: int) -> Plan:
    """Return the plan with another limit for each of its trials."""
    before = plan.commands[: len(plan.commands) - len(plan.trials)]
    return replace(plan, commands=[*before, *(replace(c, limit_min=walltime_min) for c in plans.trial_commands(plan))])
