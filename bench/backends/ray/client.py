"""Ask a Ray cluster, through its dashboard, by Ray's own client: its jobs, its version, its nodes."""

import importlib.util
import logging
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from bench.backends.protocol import Job, JobState
from bench.backends.ray import request
from bench.errors import ConfigError, SubmitError
from bench.rules.registry import RULES

TIMEOUT_S = 10.0
MAX_REASON = 400
"""Characters of what Ray says of a job; after a failure it repeats the end of the job's log."""
STATES = {
    "PENDING": JobState.queued,
    "RUNNING": JobState.running,
    "SUCCEEDED": JobState.completed,
    "FAILED": JobState.failed,
    "STOPPED": JobState.cancelled,
}
"""Source: ray.job_submission.JobStatus."""
CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
"""Loggers that tell of each package that is sent."""
_log = logging.getLogger(__name__)


class UnreachableError(SubmitError):
    """Nobody answers at an address."""


def is_here() -> bool:
    """Return whether Ray's client is installed on this machine."""
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec("ray.job_submission") is not None
    return False


def connect(address: str) -> Any:
    """Return Ray's client of a cluster.

    Raises:
        ConfigError: Ray is not installed here.
        SubmitError: nobody answers at the address, or something that takes no jobs.
    """
    if not is_here():
        raise ConfigError("Ray is not installed here", where="cluster.backend=ray", fix="pip install 'runstop[ray]'")
    from ray.job_submission import JobSubmissionClient

    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    require_listening(address)
    with _answering(address):
        return JobSubmissionClient(address)


def require_listening(address: str) -> None:
    """Raise UnreachableError unless somebody listens there; Ray's own client would wait for minutes."""
    parts = urlsplit(address)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise unreachable(address, str(error)) from error


def unreachable(address: str, why: str) -> UnreachableError:
    """Return the error of an address at which no Ray cluster takes jobs."""
    what = f"no Ray cluster takes jobs at {address}: {' '.join(why.split())[:MAX_REASON]}"
    return UnreachableError(what, where=address, fix=RULES["RAY-01"].fix, rule="RAY-01")


@contextmanager
def _answering(address: str) -> Iterator[None]:
    """Raise UnreachableError where Ray's client gets no answer in the block, an error, or an answer that is not Ray's.

    For a status that is not 200 the client raises RuntimeError; errors of requests are OSErrors.
    """
    try:
        yield
    except (RuntimeError, OSError, ValueError, KeyError, TypeError) as error:
        raise unreachable(address, str(error) or type(error).__name__) from error


def get(address: str, path: str) -> Any:
    """Return what a page of the dashboard answers, as JSON holds it.

    Raises:
        UnreachableError: it does not.
    """
    with _answering(address):
        answer = connect(address)._do_request("GET", path)  # with the tokens and certificates of Ray's own client
        answer.raise_for_status()
        return answer.json()


def _jobs(client: Any, address: str) -> Sequence[Any]:
    """Return all jobs that a cluster knows (ray.job_submission.JobDetails).

    Raises:
        UnreachableError: it does not say.
    """
    with _answering(address):
        return list(client.list_jobs())


def states(jobs: Sequence[str]) -> dict[str, Job]:
    """Return where jobs stand, by id, with one question to each cluster; what none of them knows is left out.

    A cluster that does not answer may have been shut down, and its jobs with it: it is told, and no error.

    Raises:
        SubmitError: a cluster is there, and does not list its jobs: they may well run.
    """
    found: dict[str, Job] = {}
    wanted = {job: request.split(job) for job in jobs}
    for address in sorted({address for _, address in wanted.values() if address}):
        try:
            client = connect(address)
        except SubmitError as error:
            _log.warning("%s", error.what)
            continue
        listed = {details.submission_id: details for details in _jobs(client, address)}
        mine = {job: submission for job, (submission, place) in wanted.items() if place == address}
        found |= {job: as_job(job, listed[name]) for job, name in mine.items() if name in listed}
    return found


def as_job(id: str, details: Any) -> Job:
    """Return a job as its cluster describes it (ray.job_submission.JobDetails)."""
    word = str(getattr(details.status, "value", details.status))
    start_ms, end_ms = details.start_time, details.end_time
    elapsed_s = int((end_ms or time.time() * 1000) - start_ms) // 1000 if start_ms else None
    code = details.driver_exit_code
    return Job(
        id=id,
        state=STATES.get(word, JobState.running),
        word=word,
        reason="" if word == "RUNNING" else reason(details.error_type, details.message),
        exit_code="" if code is None else (f"0:{-code}" if code < 0 else f"{code}:0"),
        elapsed_s=elapsed_s,
        start=time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start_ms / 1000)) if start_ms else "",
    )


def reason(error_type: str | None, message: str | None) -> str:
    """Return what Ray says of a job on one line: the kind of its error, and the first and last words about it."""
    kind = str(getattr(error_type, "value", error_type or "")).rpartition(".")[2]
    text, _, rest = " ".join((message or "").split()).partition(", last available logs")
    text, rest = text[:MAX_REASON], text[MAX_REASON:] + rest
    end = f"… {rest[-MAX_REASON:]}" if rest else ""
    return ": ".join(part for part in (kind, text, end) if part)


def submitted(address: str, folder: str) -> list[str]:
    """Return the ids of the jobs of a run folder that are queued or running.

    Raises:
        SubmitError: the cluster cannot be asked.
    """
    mine = _of(_jobs(connect(address), address), address, folder)
    return [id for id, details in mine if as_job(id, details).state.is_active]


def _of(listed: Iterable[Any], address: str, folder: str) -> Iterable[tuple[str, Any]]:
    for details in listed:
        if (details.metadata or {}).get(request.FOLDER) == folder:
            yield request.job_id(details.submission_id, address), details


def stop(job: str) -> None:
    """Tell a job to end.

    Raises:
        SubmitError: its cluster refuses, or cannot be reached.
    """
    submission, address = request.split(job)
    with _answering(address):
        try:
            is_told = connect(address).stop_job(submission)
        except RuntimeError as error:
            raise SubmitError(_first_line(error), where=f"job {job}", fix=f"ray job stop {submission}") from error
    if not is_told:
        what, fix = "Ray has nothing to stop: the job has ended", "python -m bench runs shows how"
        raise SubmitError(what, where=f"job {job}", fix=fix)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:MAX_REASON]
