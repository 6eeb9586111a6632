"""Kubernetes as a backend: its checks, its manifest, its jobs."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import masked_json, masking
from bench.backends.kubernetes import checks as kubernetes_checks
from bench.backends.kubernetes import client, manifest, names, states
from bench.backends.kubernetes.client import ApiError, NoServerError
from bench.backends.kubernetes.manifest import Named
from bench.backends.kubernetes.names import JobId
from bench.backends.kubernetes.pod_template import AS_PLANNED, Object, TimeLimits
from bench.backends.protocol import Job
from bench.contract import atomic_files, plan_kinds
from bench.contract.cluster import ObjectKind
from bench.contract.plan import Plan
from bench.contract.run_files import JOB, KUBERNETES_MANIFEST, PLAN, SUBMISSION
from bench.contract.schema import BackendName
from bench.errors import BenchError, ConfigError, SubmitError
from bench.planning import commands
from bench.rules.check import TIERS, Check, Finding, Subject, Tier

DELETED = ("PyTorchJob", "TrainJob", "TrainingRuntime", "JobSet", "Job")
"""Kinds, in the order in which they go: what owns others first."""


def submit(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
    """Return the id of the job that now runs the plan; `forced` findings are kept beside it.

    Raises:
        SubmitError: the API server refuses an object, in its own words; those that it had taken are gone again.
    """
    made = {"backend": BackendName.kubernetes.name, "jobs": [], "image": {"name": names.settings(plan).image}}
    if forced:
        made["forced"] = [f"{finding.rule}: {finding.what}" for finding in forced]
    masked_json.write(folder / JOB, made)
    return _submitted(plan, folder, made)


def resume(folder: Path, *, trials_left: int, walltime_min: int | None, arguments: Sequence[str]) -> str:
    """Return the id of a job that goes on with a run.

    Raises:
        ConfigError: it has no plan, or arguments for a command that there is not.
        SubmitError: the API server refuses it; nothing in the folder has changed then.
    """
    if arguments:
        raise ConfigError(
            f"{' '.join(arguments)} is for sbatch, and this run is on Kubernetes", where="--sbatch", fix="leave it out"
        )
    limits = AS_PLANNED
    if walltime_min is not None:
        limits = TimeLimits(job_min=commands.job_min(trials_left, walltime_min), trial_min=walltime_min)
    return _submitted(plan_kinds.load(folder / PLAN), folder, atomic_files.read_object(folder / JOB), limits=limits)


def submitted(folder: Path) -> list[str]:
    """Return the ids of active jobs that were submitted for a run folder.

    Raises:
        SubmitError: the API server cannot be asked.
    """
    note = atomic_files.read_object(folder / SUBMISSION)
    job = names.read_id(str(note["job"])) if "job" in note else None
    return [str(job)] if job and states.active(job) else []


def cancel(job: JobId) -> None:
    """Delete what works on a run; its pods are told to end. The plan stays, for whoever asks what ran.

    Raises:
        SubmitError: the API server refuses, or does not answer.
    """
    for kind in DELETED if job.kind is not ObjectKind.job else ("Job",):
        with suppress(_NoSuchKindError):
            for made in _listed(job, kind):
                client.delete(kind, job.namespace, made["metadata"]["name"], context=job.context)


def printed(job: JobId) -> dict[str, str]:
    """Return what each pod of a job has printed, the first one's first; pods that have not begun are left out.

    Raises:
        SubmitError: the API server cannot be asked.
    """
    found: dict[str, str] = {}
    pods = states.objects_of(job, "Pod")
    for name in sorted(pod["metadata"]["name"] for pod in pods):
        try:
            said = client.request("GET", f"{client.path_of('Pod', job.namespace, name)}/log", context=job.context)
        except ApiError as error:
            if error.status not in (400, 404):  # it waits for its image; it is gone
                raise
        else:
            found[name] = said if isinstance(said, str) else json.dumps(said)
    return found


class _NoSuchKindError(Exception):
    """The cluster has no such kind."""


def _listed(job: JobId, kind: str) -> list[Object]:
    try:
        return states.objects_of(job, kind)
    except ApiError as error:
        if error.status == 404:
            raise _NoSuchKindError from error
        raise


def _submitted(plan: Plan, folder: Path, held: Mapping[str, Any], *, limits: TimeLimits = AS_PLANNED) -> str:
    """Create a job's objects, and keep its id. A note says so before: where an answer is lost it names the job."""
    entries = held.get("jobs") or []
    name = names.of_folder(folder, len(entries) + 1)
    job = names.job_id(plan, name)
    annotations = {names.FOLDER: str(folder)}
    named = Named(name=name, folder=names.in_pods(plan, folder), annotations=annotations, limits=limits)
    objects = manifest.objects(plan, named)
    text = manifest.written(plan, objects)
    masking.refuse([text], where=KUBERNETES_MANIFEST)
    again = atomic_files.read_object(folder / SUBMISSION).get("job") == str(job)
    masked_json.write(folder / SUBMISSION, {"since": time.time(), "job": str(job)})
    try:
        _create(objects, job, again=again)
    except NoServerError as error:
        if not _is_there(job):
            what = f"{error.what}; the job may have been made all the same"
            fix = f"`python -m bench runs` shows it if there is one; else python -m bench resume {folder}"
            raise SubmitError(what, where=error.where, fix=fix, rule=error.rule) from error
    except BenchError:
        (folder / SUBMISSION).unlink(missing_ok=True)
        raise
    (folder / KUBERNETES_MANIFEST).write_text(text)
    masked_json.write(folder / JOB, {**held, "jobs": [*entries, {"id": str(job), "submitted": time.time()}]})
    (folder / SUBMISSION).unlink(missing_ok=True)
    return str(job)


def _create(objects: Sequence[Object], job: JobId, *, again: bool) -> None:
    """Create all objects, or none: where one is refused, those before it are deleted again.

    again: they have been asked for before, and the answer was lost, so that some of them may be there.
    """
    done: list[Object] = []
    for made in objects:
        try:
            client.create(made, context=job.context)
        except ApiError as error:
            if not (again and error.status == 409):
                _delete(reversed(done), job)
                raise _refused(error, made) from error
        done.append(made)


def _delete(objects: Iterable[Object], job: JobId) -> None:
    for made in objects:
        with suppress(SubmitError):
            client.delete(made["kind"], job.namespace, made["metadata"]["name"], context=job.context)


def _refused(error: ApiError, made: Object) -> SubmitError:
    """Return what the API server said of an object."""
    kind = made["kind"]
    if error.status == 404 and error.message.startswith("404"):
        what = f"this cluster has no {kind} ({made['apiVersion']})"
        fix = "have its operator installed, or choose another cluster.kubernetes.object; `job` needs none"
        return SubmitError(what, where="cluster.kubernetes.object", fix=fix, rule="KUB-06")
    return SubmitError(error.what, where=f"{kind} {made['metadata']['name']}", fix=error.fix, rule=error.rule)


def _is_there(job: JobId) -> bool:
    with suppress(SubmitError):
        return states.active(job)
    return False


class KubernetesBackend:
    """Jobs are objects of the cluster; each node is a pod, whose ranks are started by `bench.driver`."""

    tiers: tuple[Tier, ...] = TIERS
    files_tier: Tier = "nodes"
    """Data, checkpoint and results lie in volumes, which only pods see."""

    def is_here(self) -> bool:
        return client.is_here()

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": kubernetes_checks.CONFIG_CHECKS, "login": kubernetes_checks.SITE_CHECKS}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        text = manifest.text(plan)
        return Subject(plan, text) if tier == "laptop" else kubernetes_checks.ask_all(plan, text)

    def render(self, plan: Plan) -> str:
        return manifest.text(plan)

    def differences(self, rendered: str, plan_json: str) -> Iterable[str]:
        if manifest.held_plan(rendered) != plan_json:
            yield "the manifest holds another plan"

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        return plan.environment

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        return states.states(ids)

    def submitted(self, folder: Path) -> list[str]:
        return submitted(folder)

    def cancel(self, job: str) -> None:
        cancel(names.read_id(job))

    def printed(self, job: str) -> Mapping[str, str]:
        return printed(names.read_id(job))

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        return submit(plan, folder, forced=forced)

    def resume(
        self, folder: Path, *, trials_left: int, walltime_min: int | None = None, arguments: Sequence[str] = ()
    ) -> str:
        return resume(folder, trials_left=trials_left, walltime_min=walltime_min, arguments=arguments)

    def without(self, plan: Plan, nodes: Sequence[str]) -> str:
        left_out = [*names.settings(plan).exclude_nodes, *nodes]
        return f"cluster.kubernetes.exclude_nodes=[{','.join(left_out)}]"
