"""Write the manifest of a plan: every object of the run, in the dialect of the cluster. Pure.

It holds its plan, so that `kubectl apply -f` of it alone is the whole run. Objects are built as data and written by a
YAML library (`bench.backends.kubernetes.manifest`).
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
from bench.texts import steering

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_/.@-]*(?: [A-Za-z0-9_/.@-]+)*")
_WORDS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"])


class _Dumper(yaml.CSafeDumper):
    """Writes texts in quotes where in doubt, those of several lines as they stand, and never an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    is_plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    style = "|" if "\n" in text else None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump_all(objects: Iterable[Any]) -> str:
    """Return objects as documents of one file."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, explicit_start=True, width=10_000)


def load_all(text: str) -> Iterator[Any]:
    """Yield the objects of a file."""
    yield from yaml.load_all(text, Loader=yaml.CSafeLoader)


FINAL_CODES = [1, 2]
"""Exit codes of a runner whose run has its last word; any other says that another start goes on with it."""
_REPLICA = "node"
"""What JobSets call the pods of a run; Kubeflow Trainer wants this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a job's objects are called, and where its run folder is in pods."""

    name: str
    folder: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    limits: TimeLimits = AS_PLANNED

    def place(self, node: str, lead: str, container: str = "runstop") -> Place:
        """Return the place of one of its pods."""
        return Place(name=self.name, folder=self.folder, node=node, lead=lead, container=container, limits=self.limits)


def text(plan: Plan) -> str:
    """Return the manifest that somebody applies by hand; its run folder has the name of its objects."""
    name = names.of_plan(plan)
    return written(plan, objects(plan, Named(name=name, folder=f"{plan.config.cluster.paths.logs or ''}/{name}")))


def written(plan: Plan, made: list[Object]) -> str:
    """Return objects as YAML, with what they are in a comment above them."""
    summary = "".join(" " if steering(letter) else letter for letter in plan.config.task.summary)
    return (
        f"# {plan.name}: {summary}\n"
        "# Written by `python -m bench render`. Start it: kubectl apply -f FILE\n" + dump_all(made)
    )


def objects(plan: Plan, of: Named) -> list[Object]:
    """Return all objects of a job: the plan, the Service that gives pods their names, and what becomes the pods."""
    held = _object(plan, of, "v1", "ConfigMap") | {"data": {PLAN: plan_kinds.dumps(plan)}}
    return [held, *_service(plan, of), *_work(plan, of)]


def held_plan(text: str) -> str:
    """Return the plan in a manifest; nothing if it holds none."""
    for made in load_all(text):
        if isinstance(made, dict) and made.get("kind") == "ConfigMap" and PLAN in (made.get("data") or {}):
            return str(made["data"][PLAN])
    return ""


def _object(plan: Plan, of: Named, version: str, kind: str, *, node: str | None = None) -> Object:
    metadata: Object = {
        "name": of.name if node is None else f"{of.name}-{node}",
        "namespace": names.settings(plan).namespace,
        "labels": names.labels(of.name, {} if node is None else {names.NODE: node}),
    }
    more = {"annotations": dict(of.annotations)} if of.annotations else {}
    return {"apiVersion": version, "kind": kind, "metadata": metadata | more}


def _service(plan: Plan, of: Named) -> list[Object]:
    """Return the headless Service of a Job's pods; the operators of the other kinds make one themselves."""
    cluster = names.settings(plan)
    if cluster.discovery is not Discovery.service or cluster.object is not ObjectKind.job:
        return []
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {names.RUN: of.name},
        "ports": [{"name": "lead", "port": cluster.port}],
    }
    return [_object(plan, of, "v1", "Service") | {"spec": spec}]


def _work(plan: Plan, of: Named) -> list[Object]:
    """Return what becomes the pods; what Kueue admits comes last."""
    match names.settings(plan).object:
        case ObjectKind.job if names.at_least(plan, "1.24"):
            made = [_indexed_job(plan, of)]
        case ObjectKind.job:
            made = [_job_of_node(plan, of, node) for node in range(plan.world.num_nodes)]
        case ObjectKind.jobset:
            spec = _jobset(plan, of) | {"ttlSecondsAfterFinished": _keep_s(plan)}
            made = [_object(plan, of, "jobset.x-k8s.io/v1alpha2", "JobSet") | {"spec": spec}]
        case ObjectKind.pytorchjob:
            made = [_pytorchjob(plan, of)]
        case ObjectKind.trainjob:
            made = _trainjob(plan, of)
    if (queue := names.settings(plan).queue) is not None:
        made[-1]["metadata"]["labels"][names.QUEUE] = queue
    return made


def _keep_s(plan: Plan) -> int:
    return 3600 * names.settings(plan).keep_h


def _job_of_node(plan: Plan, of: Named, node: int) -> Object:
    """Return the Job of one node, whose pod has a host name of its own in the Service.

    A pod that ends early gets another one; one that finds the run's last word ends at once, as the first one did.
    """
    place = of.place(f"{node:d}", f"{of.name}-0.{of.name}")
    spec: Object = {
        "backoffLimit": plan.config.launch.attempts,
        "ttlSecondsAfterFinished": _keep_s(plan),
        "template": template(plan, place, hostname=f"{of.name}-{node:d}", subdomain=of.name),
    }
    return _object(plan, of, "batch/v1", "Job", node=f"{node:d}") | {"spec": spec}


def _indexed_job(plan: Plan, of: Named) -> Object:
    """Return one Job with a pod a node, whose index and host name are its number."""
    place = of.place("$(JOB_COMPLETION_INDEX)", f"{of.name}-0.{of.name}")
    spec = _indexed(plan, place, backoff=plan.config.launch.attempts * plan.world.num_nodes, subdomain=of.name)
    return _object(plan, of, "batch/v1", "Job") | {"spec": {"ttlSecondsAfterFinished": _keep_s(plan), **spec}}


def _indexed(plan: Plan, place: Place, *, backoff: int, **pod: Any) -> Object:
    """Return the spec of an Indexed Job. Its policy for failed pods needs 1.26: pods that were evicted do not count."""
    final = {"containerName": place.container, "operator": "In", "values": FINAL_CODES}
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


def _jobset(plan: Plan, of: Named) -> Object:
    """Return the spec of a JobSet: all pods start again when one of them ends early, as often as a trial may."""
    first = f"{of.name}-{_REPLICA}-0-0.{of.name}"
    place = of.place("$(JOB_COMPLETION_INDEX)", first, _REPLICA)
    replica: Object = {
        "name": _REPLICA,
        "replicas": 1,
        "template": {"metadata": {"labels": names.labels(of.name)}, "spec": _indexed(plan, place, backoff=0)},
    }
    final = {"name": "run-has-ended", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": of.name},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [_REPLICA]},
        "failurePolicy": {"maxRestarts": plan.config.launch.attempts, "rules": [final]},
        "replicatedJobs": [replica],
    }


def _pytorchjob(plan: Plan, of: Named) -> Object:
    """Return a PyTorchJob, whose operator tells pods their number as RANK and restarts those of exit codes from 128."""
    replicas: Object = {}
    for role, node, count in (("Master", "0", 1), ("Worker", "$(RANK)", plan.world.num_nodes - 1)):
        if count:
            made = template(plan, of.place(node, f"{of.name}-master-0", "pytorch"))
            del made["spec"]["restartPolicy"]
            port = {"name": "pytorchjob-port", "containerPort": names.settings(plan).port}
            made["spec"]["containers"][0]["ports"] = [port]
            replicas[role] = {"replicas": count, "restartPolicy": "ExitCode", "template": made}
    policy = {
        "cleanPodPolicy": "Running",
        "backoffLimit": plan.config.launch.attempts * plan.world.num_nodes,
        "ttlSecondsAfterFinished": _keep_s(plan),
    }
    spec = {"runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return _object(plan, of, "kubeflow.org/v1", "PyTorchJob") | {"spec": spec}


def _trainjob(plan: Plan, of: Named) -> list[Object]:
    """Return a TrainJob and the TrainingRuntime that says what its nodes run, which is this run's alone."""
    version, jobset = "trainer.kubeflow.org/v1alpha1", _jobset(plan, of)
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    jobset["replicatedJobs"][0]["template"]["metadata"]["labels"] |= step
    runtime = _object(plan, of, version, "TrainingRuntime")
    runtime["spec"] = {"mlPolicy": {"numNodes": plan.world.num_nodes}, "template": {"spec": jobset}}
    train = _object(plan, of, version, "TrainJob")
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": of.name}
    train["spec"] = {"runtimeRef": reference, "trainer": {"numNodes": plan.world.num_nodes}}
    return [runtime, train]
