"""Write KubeRay's objects for a plan: a RayJob with a Ray cluster of its own, or a RayCluster that stays. Pure.

The pods are those of the Kubernetes backend, less what starts them, which KubeRay writes itself. A RayJob's manifest
holds its plan, so that `kubectl apply -f` of it alone is the whole run.
"""

import shlex
from collections.abc import Iterator
from typing import Any

from bench.backends.kubernetes import manifest as kubernetes
from bench.backends.kubernetes import names, pod_template
from bench.backends.kubernetes.pod_template import Object, Place
from bench.backends.ray import request
from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.contract.cluster import KubeRay, RayObject
from bench.contract.plan import Plan
from bench.contract.run_files import PLAN
from bench.contract.schema import Device
from bench.errors import ConfigError

VERSION = "ray.io/v1"
WORKERS = "nodes"
"""The name of the group of pods that are nodes of the run."""
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
"""Of the head. Source: KubeRay's samples."""


def block(plan: Plan) -> KubeRay:
    """Return what the plan says of KubeRay.

    Raises:
        ConfigError: nothing: the cluster is there without a manifest.
    """
    ray = request.settings(plan)
    if ray.kuberay is None:
        raise ConfigError(
            "a run on a Ray cluster that is there has no manifest: bench.launch sends its driver",
            where=f"cluster={plan.config.cluster.name}",
            fix="choose cluster=kuberay for a manifest; `python -m bench plan --json` prints the plan",
        )
    return ray.kuberay


def text(plan: Plan) -> str:
    """Return the manifest that somebody applies by hand."""
    return kubernetes.written(plan, objects(plan))


def differences(rendered: str, plan_json: str) -> Iterator[str]:
    """Yield whether a plan.json is not the plan in a manifest."""
    if kubernetes.held_plan(rendered) != plan_json:
        yield "the manifest holds another plan"


def objects(plan: Plan) -> list[Object]:
    """Return the plan and the RayJob, or the RayCluster alone."""
    name = names.of_plan(plan)
    if block(plan).object is RayObject.raycluster:
        return [_object(plan, "RayCluster", VERSION, name) | {"spec": _cluster(plan, name)}]
    held = _object(plan, "ConfigMap", "v1", name) | {"data": {PLAN: plan_kinds.dumps(plan)}}
    return [held, _object(plan, "RayJob", VERSION, name) | {"spec": _job(plan, name)}]


def folder(plan: Plan, name: str) -> str:
    """Return the run folder in the pods."""
    return f"{plan.config.cluster.paths.logs or ''}/{name}"


def _object(plan: Plan, kind: str, version: str, name: str) -> Object:
    cluster, labels = names.settings(plan), names.labels(name)
    if cluster.queue is not None and version == VERSION:
        labels[names.QUEUE] = cluster.queue
    metadata = {"name": name, "namespace": cluster.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _job(plan: Plan, name: str) -> Object:
    kuberay, ray = block(plan), request.settings(plan)
    assert plan.walltime_min is not None  # validate wants it where there is a queue
    return {
        "entrypoint": _entrypoint(plan, name),
        "submissionMode": kuberay.submission.value,
        "runtimeEnvYAML": kubernetes.dump_all([{"env_vars": request.SETTINGS}]).removeprefix("---\n"),
        "metadata": {request.FOLDER: folder(plan, name)},
        "activeDeadlineSeconds": 60 * (plan.walltime_min + ray.placement_timeout_min),
        "backoffLimit": 0,  # the driver itself starts a run's next attempt
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": kuberay.keep_s,
        "rayClusterSpec": _cluster(plan, name),
    }


def _entrypoint(plan: Plan, name: str) -> str:
    words = ["--plan", pod_template.plan_file(), *request.limit(plan), folder(plan, name)]
    return shlex.join([*request.DRIVER, *words])


def _cluster(plan: Plan, name: str) -> Object:
    works = block(plan).head_works
    count = plan.world.num_nodes - works
    spec: Object = {"rayVersion": request.settings(plan).version, "headGroupSpec": _head(plan, name)}
    if count:
        group = {"groupName": WORKERS, "replicas": count, "minReplicas": count, "maxReplicas": count}
        spec["workerGroupSpecs"] = [
            group | {"rayStartParams": _starts(plan), "template": _pod(plan, name, "ray-worker")}
        ]
    return spec


def _starts(plan: Plan) -> dict[str, str]:
    """Return what `ray start` is told of a node's size: what a run reserves, whatever Ray finds there."""
    gpus = plans.gpus_per_node(plan) if plan.config.cluster.device is Device.cuda else 0
    return {"num-cpus": str(request.settings(plan).cpus_per_node), "num-gpus": str(gpus)}


def _head(plan: Plan, name: str) -> Object:
    """Return the head; where it does not work it has no CPUs for Ray, so that nothing but drivers runs there."""
    kuberay, made = block(plan), _pod(plan, name, "ray-head")
    container = made["spec"]["containers"][0]
    container["ports"] = [{"containerPort": port, "name": port_name} for port_name, port in PORTS.items()]
    sizes = _starts(plan)
    if not kuberay.head_works:
        sizes = {"num-cpus": "0", "num-gpus": "0"}
        container["resources"] = {"requests": kuberay.head_resources, "limits": kuberay.head_resources}
        _set_apart(made)
    return {"rayStartParams": {"dashboard-host": "0.0.0.0"} | sizes, "template": made}


def _set_apart(head: Object) -> None:
    """Let the head run beside a node's pod: only those keep away from each other."""
    head["metadata"]["labels"].pop(names.RUN)
    affinity = head["spec"].get("affinity", {})
    affinity.pop("podAntiAffinity", None)
    if not affinity:
        head["spec"].pop("affinity", None)


def _pod(plan: Plan, name: str, container_name: str) -> Object:
    """Return a pod template whose container KubeRay starts, by `ray start`."""
    place = Place(name=name, folder=folder(plan, name), node="", lead="", container=container_name)
    made = pod_template.template(plan, place)
    pod = made["spec"]
    pod.pop("activeDeadlineSeconds")  # the RayJob's own counts
    container = pod["containers"][0]
    for key in ("command", "args"):
        container.pop(key)
    container["env"] = [one for one in container["env"] if not one["name"].startswith("RUNSTOP_")]
    if block(plan).object is RayObject.raycluster:
        pod["volumes"] = _less_plan(pod["volumes"])
        container["volumeMounts"] = _less_plan(container["volumeMounts"])
        pod.pop("restartPolicy")
    return made


def _less_plan(items: list[Any]) -> list[Any]:
    return [item for item in items if item["name"] != "plan"]
