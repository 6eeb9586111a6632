"""Query and control a Ray cluster through its dashboard with Ray's own client: jobs, version, nodes."""

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
"""Characters of Ray's message about a job; after a failure the message repeats the end of the job's log."""
STATES = {
    "PENDING": JobState.queued,
    "RUNNING": JobState.running,
    "SUCCEEDED": JobState.completed,
    "FAILED": JobState.failed,
    "STOPPED": JobState.cancelled,
}
"""Source: ray.job_submission.JobStatus."""
CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
"""Loggers with a line for each package that is uploaded."""
_log = logging.getLogger(__name__)


class UnreachableError(SubmitError):
    """No Ray cluster answers at an address."""


def is_available() -> bool:
    """Return whether Ray's client is installed on this machine."""
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec("ray.job_submission") is not None
    return False


def connect(address: str) -> Any:
    """Return Ray's client for a cluster.

    Raises:
        ConfigError: Ray is not installed on this machine.
        SubmitError: nothing answers at the address, or it is not a Ray cluster that accepts jobs.
    """
    if not is_available():
        what = "Ray is not installed on this machine"
        raise ConfigError(what, where="cluster.backend=ray", fix="pip install 'runstop[ray]'")
    from ray.job_submission import JobSubmissionClient

    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    require_listening(address)
    with _answering(address):
        return JobSubmissionClient(address)


def require_listening(address: str) -> None:
    """Raise UnreachableError if nothing listens at the address; Ray's own client would wait for minutes."""
    if not request.is_address(address):
        raise unreachable(address, "the address does not begin with http:// or https://")
    parts = urlsplit(address)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise unreachable(address, str(error)) from error


def unreachable(address: str, why: str) -> UnreachableError:
    """Return the error for an address at which no Ray cluster accepts jobs."""
    what = f"no Ray cluster accepts jobs at {address}: {' '.join(why.split())[:MAX_REASON]}"
    return UnreachableError(what, where=address, fix=RULES["RAY-01"].fix, rule="RAY-01")


@contextmanager
def _answering(address: str) -> Iterator[None]:
    """Raise UnreachableError if Ray's client gets no answer in the block, an error, or an answer in another format.

    The client raises RuntimeError for any HTTP status except 200; errors of requests are OSErrors.
    """
    try:
        yield
    except (RuntimeError, OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise unreachable(address, str(error) or type(error).__name__) from error


def get(address: str, path: str) -> Any:
    """Return the parsed JSON answer of a dashboard page.

    Raises:
        UnreachableError: there is no such answer.
    """
    with _answering(address):
        answer = connect(address)._do_request("GET", path)  # uses the tokens and certificates of Ray's client
        answer.raise_for_status()
        return answer.json()


def _jobs(client: Any, address: str) -> Sequence[Any]:
    """Return all jobs that a cluster knows (ray.job_submission.JobDetails).

    Raises:
        UnreachableError: the cluster does not list them.
    """
    with _answering(address):
        return list(client.list_jobs())


def states(jobs: Sequence[str]) -> dict[str, Job]:
    """Return jobs by id, with one request per cluster; unknown jobs are left out.

    A cluster that does not answer may have been shut down together with its jobs, so this only logs a warning.

    Raises:
        SubmitError: a cluster answers but does not list its jobs, which may be running.
    """
    known: dict[str, Job] = {}
    names = {job: request.split(job) for job in jobs}
    for address in sorted({address for _, address in names.values() if address}):
        try:
            client = connect(address)
        except SubmitError as error:
            _log.warning("%s", error.what)
            continue
        listed = {details.submission_id: details for details in _jobs(client, address)}
        mine = {job: submission for job, (submission, place) in names.items() if place == address}
        known |= {job: as_job(job, listed[name]) for job, name in mine.items() if name in listed}
    return known


def as_job(id: str, details: Any) -> Job:
    """Convert Ray's description of a job (ray.job_submission.JobDetails)."""
    native_state = str(getattr(details.status, "value", details.status))
    start_ms, end_ms = details.start_time, details.end_time
    elapsed_s = int((end_ms or time.time() * 1000) - start_ms) // 1000 if start_ms else None
    code = details.driver_exit_code
    return Job(
        id=id,
        state=STATES.get(native_state, JobState.running),
        native_state=native_state,
        reason="" if native_state == "RUNNING" else reason(details.error_type, details.message),
        exit_code="" if code is None else (f"0:{-code}" if code < 0 else f"{code}:0"),
        elapsed_s=elapsed_s,
        start=time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start_ms / 1000)) if start_ms else "",
    )


def reason(error_type: str | None, message: str | None) -> str:
    """Return Ray's message about a job on one line: the error type, and the beginning and end of the message."""
    kind = str(getattr(error_type, "value", error_type or "")).rpartition(".")[2]
    text, _, rest = " ".join((message or "").split()).partition(", last available logs")
    text, rest = text[:MAX_REASON], text[MAX_REASON:] + rest
    end = f"… {rest[-MAX_REASON:]}" if rest else ""
    return ": ".join(part for part in (kind, text, end) if part)


def submitted(address: str, folder: str) -> list[str]:
    """Return the ids of the jobs of a run folder that are queued or running.

    Raises:
        SubmitError: the cluster cannot be queried.
    """
    mine = _jobs_of(_jobs(connect(address), address), address, folder)
    return [id for id, details in mine if as_job(id, details).state.is_active]


def _jobs_of(listed: Iterable[Any], address: str, folder: str) -> Iterable[tuple[str, Any]]:
    for details in listed:
        if (details.metadata or {}).get(request.FOLDER) == folder:
            yield request.job_id(details.submission_id, address), details


def stop(job: str) -> None:
    """Stop a job.

    Raises:
        SubmitError: its cluster refuses, or cannot be reached.
    """
    submission, address = request.split(job)
    with _answering(address):
        try:
            was_running = connect(address).stop_job(submission)
        except RuntimeError as error:
            raise SubmitError(
                f"Ray cannot stop the job: {_first_line(error)}", where=f"job {job}", fix=f"ray job stop {submission}"
            ) from error
    if not was_running:
        what, fix = "the job has already ended", "run `runstop runs` to see how the job ended"
        raise SubmitError(what, where=f"job {job}", fix=fix)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:MAX_REASON]
