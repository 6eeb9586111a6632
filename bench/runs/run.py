"""Find runs by their folders, and query their backends for the states of their jobs."""

import logging
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import backends
from bench.backends.protocol import Backend, Job, JobState, NamesServers, Queue
from bench.contract import atomic_files
from bench.contract.run_files import DISK_RESERVE, JOB, LEDGER, PLAN, RANK_LOGS, STATUS, SUBMISSION
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError, SubmitError, with_rule
from bench.runs import folder as folders
from bench.runs import ledger, names
from bench.runs import status as statuses
from bench.runs.folder import plan_in, short
from bench.runs.ledger import Outcome
from bench.runs.status import Status

POLL_S = 5.0
ENDS_S = 300.0
"""How long a job may take to end after it wrote status.json: its container and its node are cleaned up."""
LAG_S = 60.0
"""How long a backend may not know a job before the job counts as lost."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder, and the state of its job."""

    folder: Path
    backend: BackendName
    jobs: tuple[str, ...]
    """The ids of its jobs, the newest last; none for a run on the machine that started it."""
    state: Job | None
    elements: tuple[Job, ...]
    """The tasks of a job array, one per trial that its backend knows."""
    outcomes: tuple[Outcome, ...]
    """Of each trial, by the ledger."""
    status: Status | None
    """The final status; None until the job has written it."""
    is_queried: bool = True
    """Whether its backend could be queried from this machine."""
    why_not_queried: str = ""
    """Why the server that its job.json names is not queried: another user wrote the folder, or it is a copy."""
    may_be_active: bool = False
    """Whether its backend did not answer, and the folder does not show that the run has ended."""
    unknown_backend: str = ""
    """The backend in job.json if there is none of that name; `backend` is then meaningless, and is not queried."""

    @property
    def id(self) -> str:
        """The id of the newest job; without a job the path of the folder."""
        return self.jobs[-1] if self.jobs else str(self.folder)

    @property
    def states(self) -> tuple[Job, ...]:
        """The state of the job, or of each task of a job array."""
        return self.elements or ((self.state,) if self.state else ())

    @property
    def is_active(self) -> bool:
        """Whether it has a queued or running job."""
        return any(job.state.is_active for job in self.states)

    @property
    def state_name(self) -> str:
        """The backend's name of the state while a job is active; then the outcome of the run."""
        if self.is_active:
            native = [job.native_state for job in self.states]
            counts = Counter(native)
            return ", ".join(f"{counts[name]} {name}" for name in counts) if self.elements else native[0]
        if self.status is not None:
            return str(self.status.outcome)
        if not self.states:
            return self._unknown
        return min(
            self.states, key=lambda job: job.state is JobState.completed
        ).native_state  # a job that did not complete comes first

    @property
    def _unknown(self) -> str:
        if self.why_not_queried:
            return f"unknown: {self.backend.name} is not queried, because {self.why_not_queried}"
        if not self.is_queried:
            return f"unknown: {self.unknown_backend or self.backend.name} cannot be queried here"
        return f"unknown to {self.backend.name}" if self.jobs else "no job"

    @property
    def has_died(self) -> bool:
        """Whether its job ended without writing status.json: the batch script or its node was killed."""
        has_reserve = (
            self.folder / DISK_RESERVE
        ).exists()  # the script creates it at its start and removes it at its end
        return has_reserve and self.is_queried and not self.is_active and self.status is None


def find(folder: Path) -> Run:
    """Return one run.

    Raises:
        ConfigError: the folder is not a run folder, or there is no backend of the name in job.json.
    """
    require_run(folder)
    run = in_folders([folder])[0]
    if run.unknown_backend:
        what = (
            f"the run uses the backend {run.unknown_backend}, but this version of runstop has only the backends "
            f"{', '.join(BackendName.__members__)}"
        )
        raise ConfigError(what, where=str(folder / JOB), fix="use the version of runstop that started the run")
    return run


def require_run(folder: Path) -> None:
    """Raise ConfigError if a folder is not a run folder."""
    if not names.is_run(folder):
        if (folder / RANK_LOGS).is_dir():  # `folder.make` creates it first
            raise ConfigError(
                f"the launch was killed before it wrote {PLAN}, so the run has not started",
                where=str(folder),
                fix=f"launch the run again; to delete this folder: rm -r {shlex.quote(str(folder))}",
            )
        raise names.not_a_run(folder)


def below(root: Path, *, must_answer: bool = False) -> list[Run]:
    """Return the runs below a folder, the oldest first; each backend is queried once for all of its runs.

    If a backend cannot be queried, a warning is logged, and the states of its runs come from their folders only.

    Raises:
        ConfigError: no such folder.
        BenchError: a backend cannot be queried, and `must_answer` is set.
    """
    names.require_root(root)
    listed = dict.fromkeys(path.parent for name in (JOB, LEDGER) for path in root.glob(f"*/{name}"))
    return in_folders([folder for folder in listed if not names.is_shared_job(folder)], must_answer=must_answer)


def wait(folder: Path, *, started: bool = False) -> Iterator[Job]:
    """Yield the state of a run's job whenever it changes, until the job runs (`started`) or has ended.

    A job that has written status.json counts as ended once its backend reports so, or ENDS_S later.
    """
    last, missing_since = None, time.monotonic()
    over_since: float | None = None
    while True:
        job = find(folder).state
        if job is not None:
            missing_since = time.monotonic()
            if last is None or (job.native_state, job.reason) != (last.native_state, last.reason):
                yield job
            last = job
        is_pending = job is None or (job.state is JobState.queued if started else job.state.is_active)
        if (folder / STATUS).exists():
            over_since = over_since or time.monotonic()
            is_pending = is_pending and job is not None and not started and time.monotonic() - over_since < ENDS_S
        if not is_pending:
            return
        if time.monotonic() - missing_since > LAG_S:
            raise SubmitError(
                "the backend no longer lists the job of this run",
                where=str(folder),
                fix=f"to see why: runstop why {short(folder)}",
            )
        time.sleep(POLL_S)


def exit_code(folder: Path) -> int:
    """Return the exit code of a run that has ended: from status.json, else from the state of its job."""
    run = find(folder)
    if run.status is not None:
        return run.status.exit_code
    return 0 if run.states and all(job.state is JobState.completed for job in run.states) else 1


def in_folders(folders: Sequence[Path], *, must_answer: bool = True) -> list[Run]:
    """Return the runs of these folders, by path; errors and warnings as `below`."""
    raw = {path: atomic_files.read_object(path / JOB) for path in dict.fromkeys(sorted(folders))}
    from_folders = [_from_folder(path, job) for path, job in raw.items()]
    queried: dict[Path, Run] = {}
    silent = set[BackendName]()
    known = [run for run in from_folders if not run.unknown_backend]
    for name in {run.backend for run in known}:
        try:
            queried |= _query(backends.get(name), [run for run in known if run.backend is name])
        except BenchError as error:
            if must_answer:
                raise
            what = with_rule(error.rule, error.what)
            _log.warning("the states of runs are unknown, because %s cannot be queried: %s", name.name, what)
            silent.add(name)
    return [queried.get(run.folder) or _not_queried(run, is_silent=run.backend in silent) for run in from_folders]


def _not_queried(run: Run, *, is_silent: bool) -> Run:
    is_open = is_silent and run.status is None and not run.unknown_backend
    return replace(run, is_queried=False, may_be_active=is_open)


def _query(backend: Backend, runs: Sequence[Run]) -> dict[Path, Run]:
    """Return the runs of a backend with their states, by folder; empty if the backend is not on this machine."""
    if not backend.is_available():
        return {}
    if isinstance(backend, NamesServers):
        whys = {run.folder: why for run in runs if (why := _why_not_queried(run.folder, backend))}
        own = _states(backend, [run for run in runs if run.folder not in whys])
        others = [
            replace(run, why_not_queried=whys[run.folder], is_queried=False) for run in runs if run.folder in whys
        ]
        return own | {run.folder: run for run in others}
    return _states(backend, runs)


def _why_not_queried(folder: Path, backend: NamesServers) -> str:
    """Return why a backend must not ask the server that a folder names; empty if it may."""
    if why := folders.other_writers(folder):
        return why
    return "" if backend.is_own_server(folder) else "this folder is a copy of another run folder"


def _states(backend: Backend, runs: Sequence[Run]) -> dict[Path, Run]:
    if not runs:
        return {}
    if isinstance(backend, Queue):
        runs = [_with_unrecorded_jobs(run, backend) for run in runs]
    known = backend.states([run.id for run in runs if run.jobs or not isinstance(backend, Queue)])
    return {run.folder: _with_state(run, known) for run in runs}


def _with_unrecorded_jobs(run: Run, queue: Queue) -> Run:
    """Return a run with the jobs that its queue has and that job.json lacks, since the reply to sbatch was lost."""
    if not (run.folder / SUBMISSION).exists():
        return run
    return replace(run, jobs=(*run.jobs, *(job for job in queue.submitted(run.folder) if job not in run.jobs)))


def _from_folder(path: Path, job: Mapping[str, Any]) -> Run:
    """Return a run from its folder alone, without the states of its jobs."""
    # Earlier versions did not write the name; of their runs only those of Slurm have a job.json.
    written = str(job.get("backend", BackendName.slurm.name)) if job else _planned_queue(path)
    name = BackendName.__members__.get(written)
    outcomes = tuple(entry.outcome for entry in ledger.entries(path))
    status = statuses.read(path)
    return Run(
        folder=path,
        backend=name or BackendName.local,
        jobs=_job_ids(job.get("jobs")),
        state=None,
        elements=(),
        outcomes=outcomes,
        status=status,
        unknown_backend="" if name else written,
    )


def _planned_queue(path: Path) -> str:
    """Return the queue in the plan of a run that was killed before it had a job.json; `local` for runs without one."""
    plan = None if (path / LEDGER).exists() else plan_in(path)
    if plan is not None and isinstance(backends.for_plan(plan), Queue):
        return plan.config.cluster.backend.name
    return BackendName.local.name


def _job_ids(entries: Any) -> tuple[str, ...]:
    """Return the ids of the jobs in job.json; malformed entries are left out."""
    ids = [entry.get("id") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return tuple(str(id) for id in ids if isinstance(id, str | int))


def _with_state(run: Run, known: Mapping[str, Job]) -> Run:
    """Return a run with the state of its newest job, and of the tasks if that is a job array."""
    elements = tuple(job for id, job in known.items() if run.jobs and id.startswith(f"{run.id}_"))
    active = next((job for job in elements if job.state.is_active), elements[-1] if elements else None)
    return replace(run, state=known.get(run.id) or active, elements=elements)
