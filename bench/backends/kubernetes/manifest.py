"""Render a plan as a Kubernetes manifest with every object of the run. Pure.

The manifest contains the plan, so `kubectl apply -f` of this one file starts the whole run. Objects are built as
dictionaries and written by a YAML library.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from bench.backends.kubernetes import names
from bench.backends.kubernetes.pod_template import AS_PLANNED, Object, Place, TimeLimits, template
from bench.contract import plan_kinds
from bench.contract.cluster import Discovery, ObjectKind
from bench.contract.plan import Plan
from bench.contract.run_files import PLAN
from bench.errors import FINAL_CODES
from bench.texts import control_character

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_/.@-]*(?: [A-Za-z0-9_/.@-]+)*")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"])


class _Dumper(yaml.CSafeDumper):
    """Quotes strings that YAML might read as another type, writes multi-line strings as blocks, and uses no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    style = "|" if "\n" in text else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_all(objects: Iterable[Any]) -> str:
    """Return objects as the documents of one YAML file."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=10_000)


def load_all(text: str) -> Iterator[Any]:
    """Yield the objects in a YAML file."""
    yield from yaml.load_all(text, Loader=yaml.CSafeLoader)


_REPLICA = "node"
"""The name of the pods' replicated job in a JobSet; Kubeflow Trainer requires this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNames:
    """The name of a job's objects, and the path of its run folder in pods."""

    name: str
    folder: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    limits: TimeLimits = AS_PLANNED

    def place(self, node: str, lead: str, container: str = "runstop") -> Place:
        """Return the place of one pod of the job."""
        return Place(name=self.name, folder=self.folder, node=node, lead=lead, container=container, limits=self.limits)


def text(plan: Plan) -> str:
    """Return the manifest for `kubectl apply`; the run folder has the same name as the objects."""
    name = names.of_plan(plan)
    return dump(plan, objects(plan, JobNames(name=name, folder=f"{plan.config.cluster.paths.logs or ''}/{name}")))


def dump(plan: Plan, objects: list[Object]) -> str:
    """Return objects as YAML, below a comment with the plan's name and summary."""
    summary = "".join(" " if control_character(letter) else letter for letter in plan.config.task.summary)
    comment = f"# {plan.name}: {summary}\n# Written by `runstop render`. Start it: kubectl apply -f FILE\n"
    return comment + dump_all(objects)


def objects(plan: Plan, job: JobNames) -> list[Object]:
    """Return all objects of a job: a ConfigMap with the plan, a Service for the pods' host names, and the workload."""
    held = _object(plan, job, "v1", "ConfigMap") | {"data": {PLAN: plan_kinds.dumps(plan)}}
    return [held, *_service(plan, job), *_work(plan, job)]


def held_plan(text: str) -> str:
    """Return the plan in a manifest; an empty string if it contains none."""
    for item in load_all(text):
        if isinstance(item, dict) and item.get("kind") == "ConfigMap" and PLAN in (item.get("data") or {}):
            return str(item["data"][PLAN])
    return ""


def _object(plan: Plan, job: JobNames, version: str, kind: str, *, node: str | None = None) -> Object:
    metadata: Object = {
        "name": job.name if node is None else f"{job.name}-{node}",
        "namespace": names.settings(plan).namespace,
        "labels": names.settings(plan).labels | names.labels(job.name, {} if node is None else {names.NODE: node}),
    }
    more = {"annotations": dict(job.annotations)} if job.annotations else {}
    return {"apiVersion": version, "kind": kind, "metadata": metadata | more}


def _service(plan: Plan, job: JobNames) -> list[Object]:
    """Return the headless Service of a Job's pods; the operators of the other kinds create one themselves."""
    cluster = names.settings(plan)
    if cluster.discovery is not Discovery.service or cluster.object is not ObjectKind.job:
        return []
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {names.RUN: job.name},
        "ports": [{"name": "lead", "port": cluster.port}],
    }
    return [_object(plan, job, "v1", "Service") | {"spec": spec}]


def _work(plan: Plan, job: JobNames) -> list[Object]:
    """Return the objects that create the pods; the last one is the one that Kueue admits."""
    match names.settings(plan).object:
        case ObjectKind.job if names.at_least(plan, "1.24"):
            workload = [_indexed_job(plan, job)]
        case ObjectKind.job:
            workload = [_job_of_node(plan, job, node) for node in range(plan.world.num_nodes)]
        case ObjectKind.jobset:
            spec = _jobset(plan, job) | {"ttlSecondsAfterFinished": _keep_s(plan)}
            workload = [_object(plan, job, "jobset.x-k8s.io/v1alpha2", "JobSet") | {"spec": spec}]
        case ObjectKind.pytorchjob:
            workload = [_pytorchjob(plan, job)]
        case ObjectKind.trainjob:
            workload = _trainjob(plan, job)
    workload[-1]["metadata"]["labels"] |= names.queue_labels(plan)
    return workload


def _keep_s(plan: Plan) -> int:
    return 3600 * names.settings(plan).keep_h


def _job_of_node(plan: Plan, job: JobNames, node: int) -> Object:
    """Return the Job of one node, whose pod has its own host name in the Service.

    A pod that ends early is replaced. A pod of a run with a final status exits at once with the run's exit code.
    """
    place = job.place(f"{node:d}", f"{job.name}-0.{job.name}")
    spec: Object = {
        "backoffLimit": plan.config.launch.attempts,
        "ttlSecondsAfterFinished": _keep_s(plan),
        "template": template(plan, place, hostname=f"{job.name}-{node:d}", subdomain=job.name),
    }
    return _object(plan, job, "batch/v1", "Job", node=f"{node:d}") | {"spec": spec}


def _indexed_job(plan: Plan, job: JobNames) -> Object:
    """Return one Indexed Job with one pod per node; the pod's index is the node's number."""
    place = job.place("$(JOB_COMPLETION_INDEX)", f"{job.name}-0.{job.name}")
    spec = _indexed(plan, place, backoff=plan.config.launch.attempts * plan.world.num_nodes, subdomain=job.name)
    return _object(plan, job, "batch/v1", "Job") | {"spec": {"ttlSecondsAfterFinished": _keep_s(plan), **spec}}


def _indexed(plan: Plan, place: Place, *, backoff: int, **pod: Any) -> Object:
    """Return the spec of an Indexed Job. From Kubernetes 1.26 on, evicted pods do not count as failures."""
    final = {"containerName": place.container, "operator": "In", "values": [*FINAL_CODES]}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": final},
    ]
    return {
        "completionMode": "Indexed",
        "completions": plan.world.num_nodes,
        "parallelism": plan.world.num_nodes,
        "backoffLimit": backoff,
        **({"podFailurePolicy": {"rules": rules}} if names.at_least(plan, "1.26") else {}),
        "template": template(plan, place, **pod),
    }


def _jobset(plan: Plan, job: JobNames) -> Object:
    """Return the spec of a JobSet: when one pod ends early, all pods restart, at most `launch.attempts` times."""
    first = f"{job.name}-{_REPLICA}-0-0.{job.name}"
    place = job.place("$(JOB_COMPLETION_INDEX)", first, _REPLICA)
    replica: Object = {
        "name": _REPLICA,
        "replicas": 1,
        "template": {"metadata": {"labels": names.labels(job.name)}, "spec": _indexed(plan, place, backoff=0)},
    }
    final = {"name": "run-has-ended", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [_REPLICA]},
        "failurePolicy": {"maxRestarts": plan.config.launch.attempts, "rules": [final]},
        "replicatedJobs": [replica],
    }


def _pytorchjob(plan: Plan, job: JobNames) -> Object:
    """Return a PyTorchJob. Its operator sets RANK to the pod's number and restarts pods with exit codes from 128."""
    replicas: Object = {}
    for role, node, count in (("Master", "0", 1), ("Worker", "$(RANK)", plan.world.num_nodes - 1)):
        if count:
            pod = template(plan, job.place(node, f"{job.name}-master-0", "pytorch"))
            del pod["spec"]["restartPolicy"]
            port = {"name": "pytorchjob-port", "containerPort": names.settings(plan).port}
            pod["spec"]["containers"][0]["ports"] = [port]
            replicas[role] = {"replicas": count, "restartPolicy": "ExitCode", "template": pod}
    policy = {
        "cleanPodPolicy": "Running",
        "backoffLimit": plan.config.launch.attempts * plan.world.num_nodes,
        "ttlSecondsAfterFinished": _keep_s(plan),
    }
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return _object(plan, job, "kubeflow.org/v1", "PyTorchJob") | {"spec": spec}


def _trainjob(plan: Plan, job: JobNames) -> list[Object]:
    """Return a TrainJob and its TrainingRuntime, which no other run uses."""
    version, jobset = "trainer.kubeflow.org/v1alpha1", _jobset(plan, job)
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    jobset["replicatedJobs"][0]["template"]["metadata"]["labels"] |= step
    runtime = _object(plan, job, version, "TrainingRuntime")
    runtime["spec"] = {"mlPolicy": {"numNodes": plan.world.num_nodes}, "template": {"spec": jobset}}
    train = _object(plan, job, version, "TrainJob")
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    train["spec"] = {"runtimeRef": reference, "trainer": {"numNodes": plan.world.num_nodes}}
    return [runtime, train]
