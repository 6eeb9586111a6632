"""Ray as a backend: its checks, its requests and manifests, its jobs."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import masked_json, masking
from bench.backends.protocol import Job
from bench.backends.ray import checks, client, manifest, placement_group, request
from bench.contract import atomic_files, plan_kinds
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, PLAN, RAY_JOB, SUBMISSION
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError, SubmitError
from bench.planning.commands import job_min
from bench.rules.check import Check, Finding, Subject, Tier
from bench.texts import strings

WALLTIME = "walltime"
"""In job.json: the minutes that each trial of a run may take since it was resumed, in place of the plan's."""


def submit(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
    """Return the id of the job that now runs the plan in its folder; `forced` findings are kept beside it.

    Raises:
        SubmitError: Ray refuses it; or its answer is lost.
    """
    return _submitted(plan, folder, [folder], note(plan, folder, forced=forced))


def note(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> dict[str, Any]:
    """Write job.json into a run's folder, and return it; no job has it yet."""
    job: dict[str, Any] = {"backend": BackendName.ray.name, "jobs": [], "address": request.address(plan)}
    if forced:
        job["forced"] = [f"{finding.rule}: {finding.what}" for finding in forced]
    masked_json.write(folder / JOB, job)
    return job


def submit_shared(runs: Sequence[tuple[Plan, Path]], folder: Path) -> str:
    """Return the id of one job that runs several runs, one after another on the same nodes."""
    plan, names = runs[0][0], [run.name for _, run in runs]
    job = {"backend": BackendName.ray.name, "jobs": [], "address": request.address(plan), "runs": names}
    masked_json.write(folder / JOB, job)
    number = _submitted(plan, folder, [run for _, run in runs], job)
    note_shared(folder)
    return number


def note_shared(folder: Path) -> None:
    """Enter the jobs of a shared job's folder into job.json of its runs; each once, whatever was cut short before."""
    shared = atomic_files.read_object(folder / JOB)
    for run in (folder.parent / name for name in shared.get("runs") or []):
        held = atomic_files.read_object(run / JOB)
        entries = held.get("jobs") or []
        known = [str(entry["id"]) for entry in entries]
        new = [dict(entry) | {"shared": folder.name} for entry in shared.get("jobs") or [] if entry["id"] not in known]
        if held and new:
            masked_json.write(run / JOB, held | {"jobs": [*entries, *new]})


def resume(folder: Path, *, trials_left: int, walltime_min: int | None, arguments: Sequence[str]) -> str:
    """Return the id of a job that goes on with a run; `walltime_min` holds for later ones too.

    Raises:
        ConfigError: words for another backend's command.
        SubmitError: Ray refuses the job; nothing in the folder has changed then.
    """
    if arguments:
        what = f"{' '.join(arguments)} is for sbatch, and a Ray job has no such options"
        raise ConfigError(what, where="--sbatch", fix="leave it out")
    plan, job = plan_kinds.load(folder / PLAN), atomic_files.read_object(folder / JOB)
    if walltime_min is not None:
        job[WALLTIME] = walltime_min
    if (minutes := job.get(WALLTIME)) is not None:
        plan = replace(plan, walltime_min=job_min(trials_left, minutes))
    return _submitted(plan, folder, [folder], job)


def submitted(folder: Path) -> list[str]:
    """Return the ids of jobs that are queued or running for a run folder.

    Raises:
        SubmitError: its cluster cannot be asked.
    """
    address = atomic_files.read_object(folder / JOB).get("address")
    return client.submitted(str(address), str(folder.absolute())) if address else []


def _submitted(plan: Plan, folder: Path, runs: Sequence[Path], job: Mapping[str, Any]) -> str:
    """Submit a job, and keep `job` with its id once Ray has taken it.

    Before Ray is asked, a note says that it will be. The note stays where its answer is lost. The job's name is made
    of the folder and of how many jobs it has had, so that asking again cannot make a second one.
    """
    entries = job.get("jobs") or []
    body = request.body(plan, folder, runs, len(entries) + 1, walltime=job.get(WALLTIME))
    for place, _, text in strings(body, RAY_JOB):
        masking.refuse([text], where=place)
    id = request.job_id(body["submission_id"], request.address(plan))
    note, is_first = folder / SUBMISSION, not (folder / SUBMISSION).exists()
    masked_json.write(note, {"since": time.time(), "job": id})
    try:
        _take(request.address(plan), body, id)
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
    """Ray may have a job that does not stand in job.json."""


def _take(address: str, body: Mapping[str, Any], id: str) -> None:
    """Have Ray take a job.

    Raises:
        LostError: nobody can say whether it has.
        SubmitError: it has not.
    """
    jobs = client.connect(address)
    try:
        jobs.submit_job(**body)
    except (ValueError, RuntimeError) as error:
        if "already exists" in str(error):  # asked for before, by somebody who did not get the answer
            return
        what = f"Ray refuses the job: {' '.join(str(error).split())[: client.MAX_REASON]}"
        raise SubmitError(what, where=address, fix="read what it says; `ray job list` shows its jobs") from error
    except OSError as error:  # requests' errors are OSErrors
        what = f"Ray's answer is lost: {error}; it may have the job all the same"
        fix = "`python -m bench runs` shows the job if there is one"
        raise LostError(what, where=address, fix=fix, rule="RAY-01") from error


class RayBackend:
    """Jobs are drivers on a Ray cluster; ranks are children of runners, which actors start."""

    tiers: tuple[Tier, ...] = ("laptop", "login", "canary", "nodes")
    files_tier: Tier = "login"

    def is_here(self) -> bool:
        return client.is_here()

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
            (placement_group.bundle(p), p.world.num_nodes) == (placement_group.bundle(first), first.world.num_nodes)
            for p in plans
        )

    def prepare_shared(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> None:
        note(plan, folder, forced=forced)

    def submit_shared(self, runs: Sequence[tuple[Plan, Path]], folder: Path, *, name: str) -> str:
        return submit_shared(runs, folder)

    def note_shared(self, folder: Path) -> None:
        note_shared(folder)

    def without(self, plan: Plan, nodes: Sequence[str]) -> str:
        return f"a Ray cluster without {', '.join(nodes)}: drain them with `ray drain-node`"
