"""The Ray backend: checks, requests, manifests and jobs."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import masked_json, masking
from bench.backends.protocol import Job
from bench.backends.ray import checks, client, manifest, placement_group, request
from bench.contract import atomic_files, plan_kinds, run_files
from bench.contract.plan import Plan, nodes_of_job
from bench.contract.run_files import JOB, PLAN, RAY_JOB, SUBMISSION
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError, SubmitError
from bench.planning.commands import job_min
from bench.rules.check import Check, Finding, Subject, Tier
from bench.texts import strings

WALLTIME = "walltime"
"""The key in job.json with the time limit per trial, in minutes, of a resumed run; it replaces the plan's."""
ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
INODE = "inode"
"""The key in job.json with the inode of the folder in which the run was started: a copy of the folder has another."""


def submit(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
    """Submit the plan in its folder and return the job's id; job.json records the `forced` findings.

    Raises:
        SubmitError: Ray refuses the job, or its answer is lost.
    """
    return _submitted(plan, folder, [folder], note(plan, folder, forced=forced))


def note(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> dict[str, Any]:
    """Write job.json, without a job yet, into a run's folder and return its content."""
    job: dict[str, Any] = {"backend": BackendName.ray.name, "jobs": [], "address": request.address(plan)}
    job[INODE] = folder.stat().st_ino
    if forced:
        job["forced"] = [f"{finding.rule}: {finding.what}" for finding in forced]
    masked_json.write(folder / JOB, job)
    return job


def submit_shared(runs: Sequence[tuple[Plan, Path]], folder: Path) -> str:
    """Submit one job for several runs, which run one after another on the same nodes, and return its id."""
    plan, names = runs[0][0], [run.name for _, run in runs]
    job: dict[str, Any] = {"backend": BackendName.ray.name, "jobs": [], "address": request.address(plan)}
    job |= {"runs": names, INODE: folder.stat().st_ino}
    masked_json.write(folder / JOB, job)
    number = _submitted(plan, folder, [run for _, run in runs], job)
    record_shared_jobs(folder)
    return number


def record_shared_jobs(folder: Path) -> None:
    """Add the jobs of a shared job's folder to job.json of each of its runs. Idempotent."""
    shared = atomic_files.read_object(folder / JOB)
    for run in (folder.parent / name for name in run_files.runs_in(shared)):
        held = atomic_files.read_object(run / JOB)
        entries = held.get("jobs") or []
        known = [str(entry["id"]) for entry in entries]
        new = [dict(entry) | {"shared": folder.name} for entry in shared.get("jobs") or [] if entry["id"] not in known]
        if held and new:
            masked_json.write(run / JOB, held | {"jobs": [*entries, *new]})


def resume(folder: Path, *, trials_left: int, walltime_min: int | None, arguments: Sequence[str]) -> str:
    """Submit a job that resumes the run and return its id; `walltime_min` also applies to later jobs of the run.

    Raises:
        ConfigError: `arguments` holds options for sbatch.
        SubmitError: Ray refuses the job; the folder is unchanged.
    """
    if arguments:
        what = f"{' '.join(arguments)} is an option of sbatch, but this run uses Ray"
        raise ConfigError(what, where="--sbatch", fix="remove --sbatch")
    plan, job = plan_kinds.load(folder / PLAN), atomic_files.read_object(folder / JOB)
    job |= {"address": request.address(plan), INODE: folder.stat().st_ino}
    if walltime_min is not None:
        job[WALLTIME] = walltime_min
    if (minutes := job.get(WALLTIME)) is not None:
        plan = replace(plan, walltime_min=job_min(trials_left, minutes))
    return _submitted(plan, folder, [folder], job)


def submitted(folder: Path) -> list[str]:
    """Return the ids of jobs that are queued or running for a run folder.

    Raises:
        SubmitError: its cluster cannot be queried.
    """
    held = atomic_files.read_object(folder / JOB)
    if not request.is_address(address := held.get("address")):
        return []
    places = [folder, *(folder.parent / name for name in _shared_jobs(held, folder))]
    return [job for place in places for job in client.submitted(address, str(place.absolute()))]


def _shared_jobs(held: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the names of the folders, next to this one, of the jobs that a run shares with other runs."""
    entries = [entry for entry in held.get("jobs") or [] if isinstance(entry, dict)]
    names = run_files.runs_in({"runs": [entry.get("shared") for entry in entries]})
    listed = {name: atomic_files.read_object(folder.parent / name / JOB) for name in dict.fromkeys(names)}
    return [name for name, shared in listed.items() if folder.name in run_files.runs_in(shared)]


def is_own_server(folder: Path) -> bool:
    """Return whether this user chose the cluster of a folder: the environment names it, or the run was started here.

    Ray's client sends RAY_AUTH_TOKEN to the address, and job.json of a copied folder names an address of its author.
    """
    held = atomic_files.read_object(folder / JOB)
    places = {request.split(job)[1] for job in _ids(held)} | {str(held.get("address", "")).rstrip("/")}
    own = {os.environ.get(name, "").rstrip("/") for name in ADDRESS_VARIABLES}
    return held.get(INODE) == folder.stat().st_ino or places - {""} <= own


def _ids(held: Mapping[str, Any]) -> list[str]:
    entries = held.get("jobs")
    return [str(entry.get("id")) for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _submitted(plan: Plan, folder: Path, runs: Sequence[Path], job: Mapping[str, Any]) -> str:
    """Submit a job, and write `job` with the new id to job.json once Ray has accepted it.

    A note with the id is written before the request and is kept if the answer is lost. The job's name is derived from
    the folder and the number of its jobs, so repeating the request cannot create a second job.
    """
    entries = job.get("jobs") or []
    body = request.body(plan, folder, runs, len(entries) + 1, walltime=job.get(WALLTIME))
    for place, _, text in strings(body, RAY_JOB):
        masking.refuse([text], where=place)
    id = request.job_id(body["submission_id"], request.address(plan))
    note, is_first = folder / SUBMISSION, not (folder / SUBMISSION).exists()
    masked_json.write(note, {"since": time.time(), "job": id})
    try:
        _send(request.address(plan), body)
    except LostError:
        raise
    except BenchError:
        if is_first:
            note.unlink(missing_ok=True)
        raise
    masked_json.write(folder / RAY_JOB, body)
    entry = {"id": id, "submitted": time.time()}
    masked_json.write(folder / JOB, dict(job) | {"jobs": [*entries, entry], "page": request.page(id)})
    with suppress(OSError):
        note.unlink()
    return id


class LostError(SubmitError):
    """Ray's answer is lost: Ray may have a job that is not in job.json."""


def _send(address: str, body: Mapping[str, Any]) -> None:
    """Send the request for a job.

    Raises:
        LostError: the answer is lost, so the job may exist.
        SubmitError: Ray refuses the job.
    """
    jobs = client.connect(address)
    try:
        jobs.submit_job(**body)
    except (ValueError, RuntimeError) as error:
        if "already exists" in str(error):  # an earlier request whose answer was lost
            return
        what = f"Ray refuses the job: {' '.join(str(error).split())[: client.MAX_REASON]}"
        raise SubmitError(
            what,
            where=address,
            fix="correct the setting that Ray's message names; to see the jobs of Ray, run `ray job list`",
        ) from error
    except OSError as error:  # requests' errors are OSErrors
        what = f"Ray did not respond: {error}; the job may exist anyway"
        fix = "run `runstop runs` to see whether the job exists"
        raise LostError(what, where=address, fix=fix, rule="RAY-01") from error


class RayBackend:
    """A job is a driver process on a Ray cluster; its actors start one runner per node, and runners start the ranks."""

    tiers: tuple[Tier, ...] = ("laptop", "login", "canary", "nodes")
    files_tier: Tier = "login"

    def is_available(self) -> bool:
        return client.is_available()

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": checks.LAPTOP, "login": checks.LOGIN}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        return checks.subject(plan, tier)

    def render(self, plan: Plan) -> str:
        return manifest.text(plan)

    def differences(self, rendered: str, plan_json: str) -> Iterable[str]:
        return manifest.differences(rendered, plan_json)

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        return dict(plan.environment)

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        return client.states(ids)

    def is_own_server(self, folder: Path) -> bool:
        return is_own_server(folder)

    def is_of(self, job: str, folder: Path) -> bool:
        return job in submitted(folder)

    def cancel(self, job: str) -> None:
        client.stop(job)

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        return submit(plan, folder, forced=forced)

    def submitted(self, folder: Path) -> Sequence[str]:
        return submitted(folder)

    def resume(
        self, folder: Path, *, trials_left: int, walltime_min: int | None = None, arguments: Sequence[str] = ()
    ) -> str:
        return resume(folder, trials_left=trials_left, walltime_min=walltime_min, arguments=arguments)

    def shares_nodes(self, plans: Sequence[Plan]) -> bool:
        first = plans[0]
        return all(
            (placement_group.bundle(p), nodes_of_job(p)) == (placement_group.bundle(first), nodes_of_job(first))
            for p in plans
        )

    def prepare_shared(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> None:
        note(plan, folder, forced=forced)

    def submit_shared(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        return submit_shared(runs, folder)

    def record_shared_jobs(self, folder: Path) -> None:
        record_shared_jobs(folder)

    def exclude_nodes(self, plan: Plan, nodes: Sequence[str]) -> str:
        return f"remove {', '.join(nodes)} from the Ray cluster with `ray drain-node`"
