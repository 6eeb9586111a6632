"""The Kubernetes backend: checks, manifests and jobs."""

import json
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench import masked_json, masking
from bench.backends.kubernetes import checks as kubernetes_checks
from bench.backends.kubernetes import client, manifest, names, states
from bench.backends.kubernetes.client import ApiError, NoServerError
from bench.backends.kubernetes.manifest import JobNames
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
"""Kinds of objects in the order of deletion: owners first."""
OWNED = ("ConfigMap", "Service", "TrainingRuntime")
"""Kinds of objects that the cluster deletes with the last object that creates the pods."""


def submit(plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
    """Submit the plan and return the job's id; job.json records the `forced` findings.

    Raises:
        SubmitError: the API server refuses an object; its message is kept, and the objects created before are deleted.
    """
    entry = {"backend": BackendName.kubernetes.name, "jobs": [], "image": {"name": names.settings(plan).image}}
    if forced:
        entry["forced"] = [f"{finding.rule}: {finding.what}" for finding in forced]
    masked_json.write(folder / JOB, entry)
    return _submitted(plan, folder, entry)


def resume(folder: Path, *, trials_left: int, walltime_min: int | None, arguments: Sequence[str]) -> str:
    """Submit a job that resumes the run and return its id.

    Raises:
        ConfigError: the run has no plan, or `arguments` holds options for sbatch.
        SubmitError: the API server refuses the job; the folder is unchanged.
    """
    if arguments:
        raise ConfigError(
            f"{' '.join(arguments)} is an option of sbatch, but this run uses Kubernetes",
            where="--sbatch",
            fix="remove --sbatch",
        )
    limits = AS_PLANNED
    if walltime_min is not None:
        limits = TimeLimits(job_min=commands.job_min(trials_left, walltime_min), trial_min=walltime_min)
    return _submitted(plan_kinds.load(folder / PLAN), folder, atomic_files.read_object(folder / JOB), limits=limits)


def submitted(folder: Path) -> list[str]:
    """Return the ids of active jobs that were submitted for a run folder.

    Raises:
        SubmitError: the API server cannot be queried.
    """
    note = atomic_files.read_object(folder / SUBMISSION)
    job = names.read_id(str(note["job"])) if "job" in note else None
    return [str(job)] if job and states.active(job) else []


def is_of(job: JobId, folder: Path) -> bool:
    """Return whether the objects of a job have the annotation that names a run folder."""
    with suppress(_NoSuchKindError):
        objects = _listed(job, states.KINDS[job.kind])
        places = [(one["metadata"].get("annotations") or {}).get(names.FOLDER, "") for one in objects]
        return bool(places) and all(names.is_place(str(place), folder) for place in places)
    return False


def cancel(job: JobId) -> None:
    """Delete the objects that run a job; the cluster then terminates their pods and deletes the objects they own.

    Raises:
        SubmitError: the API server refuses, or does not answer.
    """
    for kind in DELETED if job.kind is not ObjectKind.job else ("Job",):
        with suppress(_NoSuchKindError):
            for item in _listed(job, kind):
                client.delete(kind, job.namespace, item["metadata"]["name"], context=job.context)


def printed(job: JobId) -> dict[str, str]:
    """Return the log of each pod of a job, by pod name in order; pods that have not started are left out.

    Raises:
        SubmitError: the API server cannot be queried.
    """
    logs: dict[str, str] = {}
    pods = states.objects_of(job, "Pod")
    for name in sorted(pod["metadata"]["name"] for pod in pods):
        try:
            log = client.request("GET", f"{client.path_of('Pod', job.namespace, name)}/log", context=job.context)
        except ApiError as error:
            if error.status not in (400, 404):  # 400: the pod waits for its image; 404: the pod is deleted
                raise
        else:
            logs[name] = log if isinstance(log, str) else json.dumps(log)
    return logs


class _NoSuchKindError(Exception):
    """The cluster does not have this kind of object."""


def _listed(job: JobId, kind: str) -> list[Object]:
    try:
        return states.objects_of(job, kind)
    except ApiError as error:
        if error.status == 404:
            raise _NoSuchKindError from error
        raise


def _submitted(plan: Plan, folder: Path, held: Mapping[str, Any], *, limits: TimeLimits = AS_PLANNED) -> str:
    """Create a job's objects and record its id in job.json.

    A note with the job's id is written before the request, so that the job can be found if the answer is lost.
    """
    entries = held.get("jobs") or []
    name = names.of_folder(folder, len(entries) + 1)
    job = names.job_id(plan, name)
    annotations = {names.FOLDER: str(folder)}
    job_names = JobNames(name=name, folder=names.in_pods(plan, folder), annotations=annotations, limits=limits)
    objects = manifest.objects(plan, job_names)
    text = manifest.dump(plan, objects)
    masking.refuse([text], where=KUBERNETES_MANIFEST)
    is_retry = atomic_files.read_object(folder / SUBMISSION).get("job") == str(job)
    masked_json.write(folder / SUBMISSION, {"since": time.time(), "job": str(job)})
    try:
        _create(objects, job, is_retry=is_retry)
    except NoServerError as error:
        if not _is_there(job):
            what = f"{error.what}; the job may exist anyway"
            retry = f"runstop resume {shlex.quote(str(folder))}"
            fix = f"run `runstop runs` to see whether the job exists; if the job does not exist: {retry}"
            raise SubmitError(what, where=error.where, fix=fix, rule=error.rule) from error
    except BenchError:
        (folder / SUBMISSION).unlink(missing_ok=True)
        raise
    (folder / KUBERNETES_MANIFEST).write_text(text)
    masked_json.write(folder / JOB, {**held, "jobs": [*entries, {"id": str(job), "submitted": time.time()}]})
    (folder / SUBMISSION).unlink(missing_ok=True)
    return str(job)


def _create(objects: Sequence[Object], job: JobId, *, is_retry: bool) -> None:
    """Create all objects or none: if one is refused, those created before it are deleted.

    is_retry: the answer to an earlier request was lost, so some of the objects may exist.
    """
    created: list[Object] = []
    owners: list[Object] = []
    for item in objects:
        try:
            stored = client.create(item, context=job.context)
        except ApiError as error:
            if not (is_retry and error.status == 409):
                raise _refused(error, item, left=_delete(reversed(created), job)) from error
            stored = _stored(item, job) if item["kind"] not in OWNED else item
        created.append(item)
        if item["kind"] not in OWNED and (uid := (stored.get("metadata") or {}).get("uid")):
            owner = {"apiVersion": item["apiVersion"], "kind": item["kind"], "name": item["metadata"]["name"]}
            owners.append(owner | {"uid": uid})
    _own(created, owners, job)


def _stored(item: Object, job: JobId) -> Object:
    with suppress(SubmitError):
        return dict(client.request("GET", _path(item, job), context=job.context))
    return {}


def _path(item: Object, job: JobId) -> str:
    return client.path_of(item["kind"], job.namespace, item["metadata"]["name"])


def _own(created: Iterable[Object], owners: Sequence[Object], job: JobId) -> None:
    """Make the workload own the other objects, so that they are deleted with it; without the right they stay."""
    if not owners:
        return
    body = {"metadata": {"ownerReferences": [*owners]}}
    for item in created:
        if item["kind"] in OWNED:
            with suppress(SubmitError):
                client.request("PATCH", _path(item, job), context=job.context, body=body)


def _delete(objects: Iterable[Object], job: JobId) -> list[str]:
    """Delete objects; return those for which the API server refused it, as kubectl names them."""
    left = []
    for item in objects:
        kind, name = item["kind"], item["metadata"]["name"]
        try:
            client.delete(kind, job.namespace, name, context=job.context)
        except SubmitError:
            left.append(f"{kind.lower()}/{name}")
    return left


def _refused(error: ApiError, item: Object, *, left: Sequence[str]) -> SubmitError:
    """Return the error for an object that the API server refused; `left` could not be deleted."""
    kind = item["kind"]
    namespace = item["metadata"]["namespace"]
    by_hand = f"; then delete the remaining objects: kubectl -n {namespace} delete {' '.join(left)}" if left else ""
    if error.status == 404 and error.message.startswith("404"):
        what = f"the Kubernetes cluster does not support the kind {kind} ({item['apiVersion']})"
        fix = f"ask the admins to install the operator that provides {kind}, or set cluster.kubernetes.object=job"
        return SubmitError(what, where="cluster.kubernetes.object", fix=fix + by_hand, rule="KUB-06")
    where = f"{kind} {item['metadata']['name']}"
    return SubmitError(error.what, where=where, fix=error.fix + by_hand, rule=error.rule)


def _is_there(job: JobId) -> bool:
    with suppress(SubmitError):
        return states.active(job)
    return False


class KubernetesBackend:
    """Jobs are Kubernetes objects. Each node of a run is one pod, in which `bench.driver` starts the ranks."""

    tiers: tuple[Tier, ...] = TIERS
    files_tier: Tier = "nodes"
    """Data, checkpoint and results are in volumes, which only pods can read."""

    def is_available(self) -> bool:
        return client.is_available()

    def checks(self, plan: Plan) -> Mapping[Tier, tuple[Check, ...]]:
        return {"laptop": kubernetes_checks.CONFIG_CHECKS, "login": kubernetes_checks.SITE_CHECKS}

    def subject(self, plan: Plan, tier: Tier) -> Subject:
        text = manifest.text(plan)
        return Subject(plan, text) if tier == "laptop" else kubernetes_checks.query_all(plan, text)

    def render(self, plan: Plan) -> str:
        return manifest.text(plan)

    def differences(self, rendered: str, plan_json: str) -> Iterable[str]:
        if manifest.held_plan(rendered) != plan_json:
            yield "the plan in the manifest differs from the plan.json of the run"

    def rank_environment(self, plan: Plan) -> dict[str, str]:
        return plan.environment

    def states(self, ids: Sequence[str]) -> dict[str, Job]:
        return states.states(ids)

    def submitted(self, folder: Path) -> list[str]:
        return submitted(folder)

    def is_own_server(self, folder: Path) -> bool:
        return True  # an id names a context of this user's kubeconfig

    def is_of(self, job: str, folder: Path) -> bool:
        return is_of(names.read_id(job), folder)

    def cancel(self, job: str) -> None:
        cancel(names.read_id(job))

    def output(self, job: str) -> Mapping[str, str]:
        return printed(names.read_id(job))

    def submit(self, plan: Plan, folder: Path, *, forced: Sequence[Finding] = ()) -> str:
        return submit(plan, folder, forced=forced)

    def resume(
        self, folder: Path, *, trials_left: int, walltime_min: int | None = None, arguments: Sequence[str] = ()
    ) -> str:
        return resume(folder, trials_left=trials_left, walltime_min=walltime_min, arguments=arguments)

    def exclude_nodes(self, plan: Plan, nodes: Sequence[str]) -> str:
        left_out = [*names.settings(plan).exclude_nodes, *nodes]
        return f"cluster.kubernetes.exclude_nodes=[{','.join(left_out)}]"
