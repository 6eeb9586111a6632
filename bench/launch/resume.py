"""End a run, or go on with one that has ended, whatever runs it."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench import backends
from bench.backends.protocol import JobState, Queue
from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.contract.run_files import LEDGER, PLAN, RESERVE, RUN_LOCK, STATUS
from bench.errors import BenchError, ConfigError, written
from bench.runs import ledger
from bench.runs import run as runs
from bench.runs import status as statuses
from bench.runs.folder import require_ours, short
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
        try:
            statuses.write(folder, status)
        except OSError as error:
            what = f"job {run.id} is cancelled, and that cannot be written down: {error.strerror}"
            fix = "make room; `python -m bench runs` shows what the queue says of the job"
            raise BenchError(what, where=str(folder / STATUS), fix=fix, rule="CFG-08") from error
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
    require_ours(folder.resolve())
    _check_ended(run)
    match backends.get(run.backend):
        case Queue() as queue:
            with written(folder), _alone(folder):
                job = _queued(queue, folder, walltime_min=walltime_min, arguments=arguments)
            print(f"job {job} goes on with {folder}")
            return 0
        case _:
            with written(folder):
                return _here(run, walltime_min=walltime_min, arguments=arguments)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep out whoever resumes the same run at the same time, where the file system has locks.

    Raises:
        ConfigError: another process does.
    """
    with (folder / RUN_LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what, fix = "another process resumes this run", f"python -m bench runs {folder.parent} shows its job"
            raise ConfigError(what, where=str(folder), fix=fix, rule="CFG-05") from error
        except OSError:
            pass
        yield


def _queued(queue: Queue, folder: Path, *, walltime_min: int | None = None, arguments: Sequence[str] = ()) -> str:
    """Return the id of the job that goes on with a run; where there is none, the folder is as it was."""
    run = runs.find(folder)
    _check_ended(run)  # once more: another process may have resumed it since
    left = 1 if run.elements else sum(not outcome.is_result for outcome in run.outcomes) or 1
    with ledger.reopened(folder), without_reserve(folder):
        return queue.resume(folder, trials_left=left, walltime_min=walltime_min, arguments=arguments)


@contextmanager
def without_reserve(folder: Path) -> Iterator[None]:
    """Set aside the reserve of a batch script that was killed; it goes for good once the block has succeeded."""
    reserve, aside = folder / RESERVE, folder / f"{RESERVE}.old"
    is_left = reserve.exists()
    if is_left:
        reserve.rename(aside)
    try:
        yield
    except BaseException:
        if is_left:
            aside.rename(reserve)
        raise
    with suppress(OSError):
        aside.unlink()


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
    from bench.launch import run_here

    if arguments:
        raise ConfigError(
            f"{' '.join(arguments)} is for a queue, and backend {run.backend.name} has none",
            where="--sbatch",
            fix="leave it out",
        )
    plan = plan_kinds.load(run.folder / PLAN)
    return run_here.run(plans.within(plan, walltime_min) if walltime_min else plan, run.folder)
