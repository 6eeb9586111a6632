"""Runs as one finds them: their folders, and where their jobs stand."""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench import backends
from bench.backends.protocol import Backend, Job, JobState, Queue
from bench.contract import atomic_files
from bench.contract.run_files import JOB, LEDGER, PLAN, RESERVE, STATUS, SUBMISSION
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError, SubmitError
from bench.runs import ledger
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Status

POLL_S = 5.0
ENDS_S = 300.0
"""How long a job may take to end once its last word is written: its container and its node are being tidied up."""
LAG_S = 60.0
"""How long a backend may take to hear again of a job that it has forgotten."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run folder, and where its job stands."""

    folder: Path
    backend: BackendName
    jobs: tuple[str, ...]
    """Every job that worked on it, the last one last; none for a run on the machine it was started from."""
    state: Job | None
    elements: tuple[Job, ...]
    """Of an array, one per trial that its backend knows."""
    outcomes: tuple[Outcome, ...]
    """Of each trial, by the ledger."""
    status: Status | None
    """What the job wrote last."""
    is_asked: bool = True
    """Whether its backend could be asked from this machine."""
    odd_backend: str = ""
    """What job.json calls its backend, where none is called so: `backend` says nothing then, and is not asked."""

    @property
    def id(self) -> str:
        """How its backend knows the run's last job."""
        return self.jobs[-1] if self.jobs else str(self.folder)

    @property
    def states(self) -> tuple[Job, ...]:
        """Of the job, or of each element of an array."""
        return self.elements or ((self.state,) if self.state else ())

    @property
    def is_active(self) -> bool:
        """Whether its backend has work of it queued or running."""
        return any(job.state.is_active for job in self.states)

    @property
    def word(self) -> str:
        """Where it stands, in one word: its backend's for what that still has, else ours."""
        if self.is_active:
            words = [job.word for job in self.states]
            counts = Counter(words)
            return ", ".join(f"{counts[word]} {word}" for word in counts) if self.elements else words[0]
        if self.status is not None:
            return str(self.status.outcome)
        if not self.states:
            return self._unknown
        return min(self.states, key=lambda job: job.state is JobState.completed).word  # first what did not complete

    @property
    def _unknown(self) -> str:
        if not self.is_asked:
            return f"unknown: {self.odd_backend or self.backend.name} cannot be asked here"
        return f"unknown to {self.backend.name}" if self.jobs else "no job"

    @property
    def has_died(self) -> bool:
        """Whether its job is gone without a last word: the batch script was killed, or its node."""
        is_left = (self.folder / RESERVE).exists()  # the script makes it when it starts, and removes it when it ends
        return is_left and self.is_asked and not self.is_active and self.status is None


def find(folder: Path) -> Run:
    """Return one run.

    Raises:
        ConfigError: the folder is not a run's, or the run is of a backend that does not exist.
    """
    if not (folder / JOB).exists() and not (folder / LEDGER).exists():
        raise ConfigError("no run in this folder", where=str(folder), fix="python -m bench runs lists the runs")
    run = _runs([folder])[0]
    if run.odd_backend:
        what = f"there is no backend {run.odd_backend}; there are {', '.join(BackendName.__members__)}"
        raise ConfigError(what, where=str(folder / JOB), fix="use the version of this program that started the run")
    return run


def below(root: Path, *, must_answer: bool = False) -> list[Run]:
    """Return the runs below a folder, the oldest first; each backend is asked once, however many runs there are.

    Of a backend that cannot be asked only the folders say where its runs stand; that is told.

    Raises:
        ConfigError: no such folder.
        BenchError: a backend cannot be asked, and `must_answer` says that each must be.
    """
    if not root.is_dir():
        raise ConfigError("no such folder", where=str(root), fix="name the folder of runs, or set LOGDIR")
    return _runs([path.parent for name in (JOB, LEDGER) for path in root.glob(f"*/{name}")], must_answer=must_answer)


def wait(folder: Path, *, started: bool = False) -> Iterator[Job]:
    """Yield where a run's job stands, whenever that changes, until it runs (`started`) or has ended.

    A job that has written its last word has ended once its backend says so, or ENDS_S later.
    """
    last, missing_since = None, time.monotonic()
    over_since: float | None = None
    while True:
        job = find(folder).state
        if job is not None:
            missing_since = time.monotonic()
            if last is None or (job.word, job.reason) != (last.word, last.reason):
                yield job
            last = job
        goes_on = job is None or (job.state is JobState.queued if started else job.state.is_active)
        if (folder / STATUS).exists():
            over_since = over_since or time.monotonic()
            goes_on = goes_on and job is not None and not started and time.monotonic() - over_since < ENDS_S
        if not goes_on:
            return
        if time.monotonic() - missing_since > LAG_S:
            raise SubmitError("nobody knows the job any more", where=str(folder), fix=f"python -m bench why {folder}")
        time.sleep(POLL_S)


def exit_code(folder: Path) -> int:
    """Return what came of a run that has ended, as its job said, or as its backend does."""
    run = find(folder)
    if run.status is not None:
        return run.status.exit_code
    return 0 if run.states and all(job.state is JobState.completed for job in run.states) else 1


def _runs(found: Sequence[Path], *, must_answer: bool = True) -> list[Run]:
    raw = {path: atomic_files.read_object(path / JOB) for path in dict.fromkeys(sorted(found))}
    unasked = [_unasked(path, job) for path, job in raw.items()]
    asked: dict[Path, Run] = {}
    askable = [run for run in unasked if not run.odd_backend]
    for name in {run.backend for run in askable}:
        try:
            asked |= _asked_of(backends.get(name), [run for run in askable if run.backend is name])
        except BenchError as error:
            if must_answer:
                raise
            _log.warning("%s cannot be asked where its runs stand: %s", name.name, error.what)
    return [asked.get(run.folder, replace(run, is_asked=False)) for run in unasked]


def _asked_of(backend: Backend, runs: Sequence[Run]) -> dict[Path, Run]:
    """Return what a backend knows of its runs, by their folders; nothing where it is not on this machine."""
    if not backend.is_here():
        return {}
    if isinstance(backend, Queue):
        runs = [_with_unnoted(run, backend) for run in runs]
    known = backend.states([run.id for run in runs if run.jobs or not isinstance(backend, Queue)])
    return {run.folder: _asked(run, known) for run in runs}


def _with_unnoted(run: Run, queue: Queue) -> Run:
    """Return a run with the jobs that its queue has, and that nobody has noted because the queue's answer was lost."""
    if not (run.folder / SUBMISSION).exists():
        return run
    return replace(run, jobs=(*run.jobs, *(job for job in queue.submitted(run.folder) if job not in run.jobs)))


def _unasked(path: Path, job: Mapping[str, Any]) -> Run:
    """Return a run without what its backend knows."""
    # Of earlier versions, which did not write the name down, only Slurm's runs have a job.json.
    word = str(job.get("backend", BackendName.slurm.name)) if job else BackendName.local.name
    name = BackendName.__members__.get(word)
    outcomes = tuple(entry.outcome for entry in ledger.found(path))
    status = statuses.read(path)
    return Run(
        folder=path,
        backend=name or BackendName.local,
        jobs=_job_ids(job.get("jobs")),
        state=None,
        elements=(),
        outcomes=outcomes,
        status=status,
        odd_backend="" if name else word,
    )


def _job_ids(entries: Any) -> tuple[str, ...]:
    """Return the ids of the jobs in job.json; entries that nobody of ours has written are left out."""
    found = [entry.get("id") for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return tuple(str(id) for id in found if isinstance(id, str | int))


def _asked(run: Run, known: Mapping[str, Job]) -> Run:
    """Return a run with the state of its last job, and of its elements if that is an array."""
    elements = tuple(job for id, job in known.items() if run.jobs and id.startswith(f"{run.id}_"))
    active = next((job for job in elements if job.state.is_active), elements[-1] if elements else None)
    return replace(run, state=known.get(run.id) or active, elements=elements)


LATEST = "latest"
_log = logging.getLogger(__name__)


def root() -> Path:
    """Return the folder that run folders are made in."""
    return Path(os.environ.get("LOGDIR") or "runs")


def resolved(run: Path) -> Path:
    """Return the run folder that is meant: the newest one for `latest`, unless a folder has that name.

    Raises:
        ConfigError: there is no run yet.
    """
    if str(run) != LATEST or run.exists():
        return run
    found = [path for name in (PLAN, LEDGER) for path in root().glob(f"*/{name}")]
    if not found:
        raise ConfigError(
            "there is no run yet", where=str(root()), fix="name a run folder, or set LOGDIR to the folder of your runs"
        )
    newest = max(found, key=lambda path: (path.stat().st_mtime, path)).parent
    _log.info("the newest run is %s", newest)
    return newest
