"""submitit's executors: Slurm's submits our sbatch script as it is; local and debug call one Python function.

submitit contributes the interface of a job (`state`, `done`, `wait`, `result`, `exception`, `cancel`, `awaitable`) and
the background process of its local executor. The script, its submission, the state of a job and its result are ours:
nothing is pickled for Slurm, and the nodes need neither Python nor submitit.

Source: submitit 1.5.4, core/core.py, slurm/slurm.py, local/local.py.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.backends import protocol
from bench.errors import BenchError, IncompleteError, SubmitError

os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")  # submitit's own log handlers would write to stdout

from submitit import DebugExecutor, Job, LocalExecutor  # noqa: E402
from submitit.core import utils  # noqa: E402
from submitit.local.debug import DebugJob  # noqa: E402
from submitit.local.local import LocalJob  # noqa: E402
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob  # noqa: E402

LAG_S = 60.0
"""How long Slurm may take to know a job that it has accepted."""
POLL_S = 30
"""The longest time between two queries for the states of jobs that are waited for."""
UNLIMITED_MIN = 60 * 24 * 365
"""submitit's local executor ends every job at a time limit; the driver has its own, for each trial."""
_log = logging.getLogger(__name__)

States = Callable[[Sequence[str]], Mapping[str, protocol.Job]]
"""Returns the states of jobs by id, by one query for all; raises SubmitError if the queue cannot be reached."""
Read = Callable[[Path], Any]
"""Returns the result in a run folder; raises BenchError if the run has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What sbatch submits: a script with one argument. submitit accepts it as a function, and nothing calls it."""

    path: Path
    folder: Path
    """The script's argument: the folder of the run, of the shared job or of the array."""
    arguments: tuple[str, ...] = ()
    """Options of sbatch."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return ["sbatch", "--parsable", *self.arguments, str(self.path), str(self.folder.absolute())]

    def __call__(self) -> None:
        raise TypeError(f"{self.path} is a script for Slurm and cannot be called as a function")


class StateWatcher(SlurmInfoWatcher):
    """Queries squeue first and sacct second, for all jobs at once; submitit's own watcher queries sacct only."""

    def __init__(self, states: States) -> None:
        super().__init__(delay_s=POLL_S)
        self.states = states
        self.jobs: dict[str, protocol.Job] = {}
        """The last known job of each id."""

    def update(self) -> None:
        self._num_calls += 1
        self._last_status_check = time.time()
        try:
            self.jobs |= self.states(sorted(self._registered - self._finished))
        except SubmitError as error:
            _log.warning("the states of jobs are unknown: %s", error.what)
        self._finished |= {id for id, job in self.jobs.items() if not job.state.is_active}

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        """Return JobID, State, NodeList and ExitCode as sacct names them; {} for a job that Slurm does not know."""
        if job_id not in self._registered:
            self.register_job(job_id)
        self.update_if_long_enough(mode)
        job = self.jobs.get(job_id)
        if job is None:
            return {}
        return {"JobID": job.id, "State": job.native_state, "NodeList": job.nodes, "ExitCode": job.exit_code}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        self.get_info(job_id, mode)
        return job_id in self._finished


def _outcome(read: Read, folder: Path) -> tuple[str, Any]:
    """Return ("success", result) or ("error", reason), from which submitit makes result() and exception().

    Raises:
        UncompletedJobError: the run was cancelled or interrupted before its trials had results.
    """
    try:
        return "success", read(folder)
    except IncompleteError as error:
        raise utils.UncompletedJobError(str(error)) from error
    except BenchError as error:
        return "error", str(error)


class RunPaths(utils.JobPaths):
    """The files of a run's job; both streams of the batch script go to one file."""

    @property
    def stdout(self) -> Path:
        written = sorted(self.folder.glob("slurm-*.out"), key=lambda path: path.stat().st_mtime)
        return written[-1] if written else self.folder / f"slurm-{self.job_id}.out"

    @property
    def stderr(self) -> Path:
        return self.stdout


class RunJob(SlurmJob[Any]):
    """A Slurm job that works on a run folder. Its result is what the folder's status, ledger and logs show."""

    watcher: StateWatcher  # of its own, or of all jobs that were submitted together

    def __init__(self, folder: Path, job_id: str, *, watcher: StateWatcher, read: Read) -> None:
        self.watcher, self._read = watcher, read
        super().__init__(folder=folder, job_id=job_id)
        self._paths = RunPaths(folder, job_id=job_id)
        self._unknown_since = time.monotonic()

    def submission(self) -> utils.DelayedSubmission:
        """Return what was submitted; submitit's own jobs return their pickled function."""
        return utils.DelayedSubmission(Script(path=self.paths.folder / "job.sbatch", folder=self.paths.folder))

    def done(self, force_check: bool = False) -> bool:
        """Return whether the job has ended; a job that Slurm has not known for LAG_S has ended, too."""
        if self.watcher.is_done(self.job_id, mode="force" if force_check else "standard"):
            return True
        if self.job_id in self.watcher.jobs:
            self._unknown_since = time.monotonic()
        return time.monotonic() - self._unknown_since > LAG_S

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        return _outcome(self._read, self.paths.folder)


class ScriptExecutor(SlurmExecutor):
    """Submits scripts. `sbatch` runs the command of a script and returns the job's id."""

    def __init__(self, folder: Path, *, sbatch: Callable[[Script], str], states: States, read: Read) -> None:
        super().__init__(folder)
        self._sbatch, self._watcher, self._read = sbatch, StateWatcher(states), read

    @classmethod
    def affinity(cls) -> int:
        """Return that the executor is usable: if sbatch is missing, the submission reports it."""
        return 2

    def _internal_process_submissions(self, delayed_submissions: Sequence[utils.DelayedSubmission]) -> list[Job[Any]]:
        return [self._job(one.function) for one in delayed_submissions]

    def _job(self, script: Any) -> Job[Any]:
        if not isinstance(script, Script):
            raise TypeError("this executor submits only scripts; use submitit.SlurmExecutor for functions")
        return RunJob(script.folder, self._sbatch(script), watcher=self._watcher, read=self._read)


def attach(jobs: Mapping[Path, str], *, states: States, read: Read) -> list[Job[Any]]:
    """Return the jobs of run folders that were submitted, by their ids; they share their queries."""
    watcher = StateWatcher(states)
    return [RunJob(folder, id, watcher=watcher, read=read) for folder, id in jobs.items()]


class ProcessJob(LocalJob[Any]):
    """A process that drives a run. Its result is that of the run folder, as for a Slurm job."""

    def __init__(self, folder: Path, job_id: str, *, process: Any, run_folder: Path, read: Read) -> None:
        super().__init__(folder=folder, job_id=job_id, process=process)
        self._run_folder, self._read = run_folder, read

    def cancel(self, check: bool = True) -> None:
        """Send SIGTERM, which submitit's controller passes on: the driver then ends its ranks.

        submitit's own cancel sends SIGINT, and SIGKILL a second later.
        """
        if self._process is not None:
            self._process.terminate()

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        return _outcome(self._read, self._run_folder)


class ProcessExecutor(LocalExecutor):
    """Calls the function that drives a run in a process of its own."""

    def __init__(self, folder: Path, *, run_folder: Path, read: Read) -> None:
        super().__init__(folder)
        self._run_folder, self._read = run_folder, read
        self.update_parameters(timeout_min=UNLIMITED_MIN)

    def _submit_command(self, command: str) -> LocalJob[Any]:
        job: LocalJob[Any] = super()._submit_command(command)
        return ProcessJob(self.folder, job.job_id, process=job._process, run_folder=self._run_folder, read=self._read)


def in_background(drive: Callable[[], object], run_folder: Path, *, files: Path, read: Read) -> Job[Any]:
    """Drive a run in a process of its own; submitit keeps the pickled function and the output in `files`."""
    return ProcessExecutor(files, run_folder=run_folder, read=read).submit(drive)


class InProcessJob(DebugJob[Any]):
    """A run that this process drives when its result is requested.

    submitit's own debug job leaves its log files open, and starts a debugger when its function fails.
    """

    def results(self) -> list[Any]:
        self._check_not_cancelled()
        return [self._submission.result()]


class InProcessExecutor(DebugExecutor):
    """Calls the function that drives a run in this process."""

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[Job[Any]]:
        return [InProcessJob(self.folder, one) for one in delayed_submissions]


def in_this_process(drive: Callable[[], object], *, files: Path) -> Job[Any]:
    """Drive a run in this process when its result is requested."""
    return InProcessExecutor(files).submit(drive)
