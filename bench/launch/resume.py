"""Cancel a run, or resume a run that has ended, on any backend."""

import fcntl
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench import backends, masked_json
from bench.backends import run_lock
from bench.backends.protocol import JobState, Queue
from bench.contract import atomic_files, plan_kinds
from bench.contract import plan as plans
from bench.contract.run_files import (
    ATTEMPTS,
    CANCELLED,
    DISK_RESERVE,
    JOB,
    LEDGER,
    MANIFEST,
    PLAN,
    RESULTS,
    RUN_LOCK,
    STATUS,
    SUBMISSION,
)
from bench.contract.schema import BackendName
from bench.driver import between_commands
from bench.errors import BenchError, ConfigError, written
from bench.runs import ledger
from bench.runs import run as runs
from bench.runs import status as statuses
from bench.runs.folder import require_ours, short
from bench.runs.run import Run
from bench.runs.status import Ending, Status


def cancel(folder: Path) -> str:
    """Cancel the job of a run and return its id; finished trials are kept.

    Raises:
        ConfigError: the run has no active job, or another user can write to it.
        SubmitError: the backend refuses.
    """
    runs.require_run(folder)
    require_ours(folder.resolve())
    run = runs.find(folder)
    if not run.is_active:
        how = "" if run.state_name == "ended" else f" ({run.state_name})"
        raise ConfigError(
            f"there is nothing to cancel: the run has ended{how}",
            where=str(folder),
            fix="no action is needed; `runstop runs` lists the active runs",
        )
    backend = backends.get(run.backend)
    if not backend.is_of(run.id, folder):
        what = f"{run.backend.name} has no job {run.id} of this user for this run folder"
        fix = f"if the folder was renamed or copied, cancel the job with the commands of {run.backend.name}"
        raise ConfigError(what, where=str(folder / JOB), fix=fix, rule="CFG-11")
    with _noted(run):
        backend.cancel(run.id)
    has_started = any(job.state is not JobState.queued for job in run.states)
    if not has_started:  # so no script writes the status
        status = Status(
            outcome=Ending.interrupted,
            exit_code=143,
            rule="SLU-08",
            what="the job was cancelled before it started",
            fix="to continue: runstop resume RUN",
        )
        try:
            statuses.write(folder, status)
        except OSError as error:
            what = f"job {run.id} was cancelled, but its status could not be written: {error.strerror}"
            fix = "free disk space; `runstop runs` still shows the state of the job in the queue"
            raise BenchError(what, where=str(folder / STATUS), fix=fix, rule="CFG-08") from error
    return run.id


@contextmanager
def _noted(run: Run) -> Iterator[None]:
    """Note in job.json that the user cancels a job, where its processes get the same signal for other reasons."""
    file = run.folder / JOB
    content = atomic_files.read_object(file)
    if run.backend not in (BackendName.kubernetes, BackendName.ray) or not content:
        yield
        return
    with suppress(OSError):
        masked_json.write(file, content | {CANCELLED: run.id})
    try:
        yield
    except BaseException:
        with suppress(OSError):
            masked_json.write(file, content)
        raise


def resume(folder: Path, *, walltime_min: int | None = None, arguments: Sequence[str] = ()) -> int:
    """Resume a run: finished trials are kept, the others get another attempt; return the exit code.

    A run that was killed after its last trial was judged gets its final status and its manifest, and no job.
    `walltime_min` is the new time limit of each trial; `arguments` are added to the backend's command, such as
    --exclude=dgx-7 to sbatch. Without a queue the run continues in this process.

    Raises:
        ConfigError: the run is still active, all trials have finished, or nothing is left to resume from.
        SubmitError: the backend refuses the job; the folder is then unchanged.
    """
    runs.require_run(folder)
    require_ours(folder.resolve())
    run = runs.find(folder)
    _check_ended(run)
    _check_resumable(run)
    if _has_results(run):
        with written(folder), _resume_lock(folder), without_reserve(folder):
            code = between_commands.finish_run(folder, plan_kinds.load(folder / PLAN))
        print(f"all trials of {short(folder)} had already finished; the missing {STATUS} and {MANIFEST} were written")
        return code
    match backends.get(run.backend):
        case Queue() as queue:
            with written(folder), _resume_lock(folder):
                job = _queued(queue, folder, walltime_min=walltime_min, arguments=arguments)
            print(f"job {job} resumes {folder}")
            return 0
        case _:
            with written(folder):
                return _resume_here(run, walltime_min=walltime_min, arguments=arguments)


@contextmanager
def _resume_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, so that no other process resumes it; without effect if the file system has no locks.

    Raises:
        ConfigError: another process holds the lock.
    """
    with open(folder / RUN_LOCK, "a", opener=run_lock.opener) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what, fix = "another process is resuming this run", f"to see its job: runstop runs {short(folder.parent)}"
            raise ConfigError(what, where=str(folder), fix=fix, rule="CFG-05") from error
        except OSError:
            pass
        yield


def _queued(queue: Queue, folder: Path, *, walltime_min: int | None = None, arguments: Sequence[str] = ()) -> str:
    """Submit a job that continues a run, and return its id; after an error the folder is unchanged."""
    run = runs.find(folder)
    _check_ended(run)  # again, under the lock: another process may have resumed it
    _require_job_file(folder)
    left = 1 if run.elements else sum(not outcome.is_result for outcome in run.outcomes) or 1
    with ledger.reopened(folder), without_reserve(folder):
        return queue.resume(folder, trials_left=left, walltime_min=walltime_min, arguments=arguments)


def _require_job_file(folder: Path) -> None:
    """Raise ConfigError if job.json has values of other types than a backend writes."""
    held = atomic_files.read_object(folder / JOB)
    jobs, arguments, environment = (held.get(name) for name in ("jobs", "arguments", "environment"))
    are_jobs = isinstance(jobs, list) and all(isinstance(one, dict) and isinstance(one.get("id"), str) for one in jobs)
    are_texts = isinstance(arguments or [], list) and all(isinstance(text, str) for text in arguments or [])
    values = (environment or {}).values() if isinstance(environment or {}, dict) else [None]
    if not (are_jobs and are_texts and all(isinstance(value, str) for value in values)):
        what, fix = "the file with the run's jobs is damaged", "start a new run with `runstop launch`"
        raise ConfigError(what, where=str(folder / JOB), fix=fix, rule="CFG-05")


@contextmanager
def without_reserve(folder: Path) -> Iterator[None]:
    """Move away the reserve file of a killed batch script; delete it once the block has succeeded, else restore it."""
    reserve, aside = folder / DISK_RESERVE, folder / f"{DISK_RESERVE}.old"
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
            f"a run can be resumed only after its job has ended, but job {run.id} is {run.state_name}",
            where=str(run.folder),
            fix=f"wait until the job has ended, or cancel the job: runstop cancel {short(run.folder)}",
        )
    is_complete = run.status is not None and run.status.outcome in (Ending.valid, Ending.invalid)
    if _has_results(run) and is_complete and os.path.lexists(run.folder / MANIFEST):
        raise ConfigError(
            "all trials have finished; there is nothing to resume",
            where=str(run.folder / LEDGER),
            fix=f"to see the results: runstop report {short(run.folder)}",
        )


def _has_results(run: Run) -> bool:
    return bool(run.outcomes) and all(outcome.is_result for outcome in run.outcomes)


def _check_resumable(run: Run) -> None:
    """Raise ConfigError if another attempt could only fail: without the ledger, or before there was a job."""
    folder = run.folder
    logs = [name for name in (RESULTS, STATUS, ATTEMPTS) for _ in folder.glob(name)]
    if not (folder / LEDGER).exists() and logs:
        raise ConfigError(
            f"{LEDGER} is missing, so runstop cannot find out which trials have finished",
            where=str(folder / LEDGER),
            fix=f"restore {LEDGER} from a copy, or start a new run; `runstop parse` can still check the logs {RESULTS}",
        )
    if run.status is None and os.path.lexists(folder / STATUS):  # runstop replaces it at once, so no kill damages it
        raise ConfigError(
            f"{STATUS} cannot be read",
            where=str(folder / STATUS),
            fix="find out what changed the file, then delete the file: `runstop resume` works without this file",
        )
    is_queued = isinstance(backends.get(run.backend), Queue)
    if is_queued and not (folder / JOB).exists() and not (folder / SUBMISSION).exists():
        raise ConfigError(
            "there is nothing to resume, because the launch was killed before it submitted a job",
            where=str(folder),
            fix=f"launch the run again; to delete this folder: rm -r {shlex.quote(str(folder))}",
        )


def _resume_here(run: Run, *, walltime_min: int | None, arguments: Sequence[str]) -> int:
    """Continue a run in this process."""
    from bench.launch import run_here

    if arguments:
        raise ConfigError(
            f"{' '.join(arguments)} is an option for a job queue, but the backend {run.backend.name} has no queue",
            where="--sbatch",
            fix="remove --sbatch",
        )
    plan = plan_kinds.load(run.folder / PLAN)
    return run_here.run(plans.within(plan, walltime_min) if walltime_min else plan, run.folder)
