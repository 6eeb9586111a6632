"""Render a plan as KubeRay objects: a RayJob with its own Ray cluster, or a permanent RayCluster. Pure.

The pods are those of the Kubernetes backend without their command, which KubeRay sets. A RayJob's manifest contains
the plan, so `kubectl apply -f` of this one file starts the whole run.
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
"""The name of the worker group whose pods are the nodes of the run."""
PORTS = {"gcs": 6379, "dashboard": 8265, "client": 10001}
"""Ports of the head. Source: KubeRay's samples."""


def block(plan: Plan) -> KubeRay:
    """Return the plan's KubeRay settings.

    Raises:
        ConfigError: it has none: the Ray cluster exists and needs no manifest.
    """
    ray = request.settings(plan)
    if ray.kuberay is None:
        raise ConfigError(
            "runstop writes no manifest for this Ray cluster: `runstop launch` submits the run to the cluster directly",
            where=f"cluster={plan.config.cluster.name}",
            fix="set cluster=kuberay to get a manifest, or run `runstop plan --json` to print the plan",
        )
    return ray.kuberay


def text(plan: Plan) -> str:
    """Return the manifest for `kubectl apply`."""
    return kubernetes.dump(plan, objects(plan))


def differences(rendered: str, plan_json: str) -> Iterator[str]:
    """Yield a difference if the plan in a manifest is not the one in plan.json."""
    if kubernetes.held_plan(rendered) != plan_json:
        yield "the plan in the manifest differs from the plan.json of the run"


def objects(plan: Plan) -> list[Object]:
    """Return a ConfigMap with the plan and a RayJob, or only a RayCluster."""
    name = names.of_plan(plan)
    if block(plan).object is RayObject.raycluster:
        return [_object(plan, "RayCluster", VERSION, name) | {"spec": _cluster(plan, name)}]
    held = _object(plan, "ConfigMap", "v1", name) | {"data": {PLAN: plan_kinds.dumps(plan)}}
    return [held, _object(plan, "RayJob", VERSION, name) | {"spec": _job(plan, name)}]


def folder(plan: Plan, name: str) -> str:
    """Return the path of the run folder in pods."""
    return f"{plan.config.cluster.paths.logs or ''}/{name}"


def _object(plan: Plan, kind: str, version: str, name: str) -> Object:
    cluster = names.settings(plan)
    labels = cluster.labels | names.labels(name) | (names.queue_labels(plan) if version == VERSION else {})
    metadata = {"name": name, "namespace": cluster.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _job(plan: Plan, name: str) -> Object:
    kuberay, ray = block(plan), request.settings(plan)
    assert plan.walltime_min is not None  # plan validation requires it for backends with a queue
    return {
        "entrypoint": _entrypoint(plan, name),
        "submissionMode": kuberay.submission.value,
        "runtimeEnvYAML": kubernetes.dump_all([{"env_vars": request.SETTINGS}]).removeprefix("---\n"),
        "metadata": {request.FOLDER: folder(plan, name)},
        "activeDeadlineSeconds": 60 * (plan.walltime_min + ray.placement_timeout_min),
        "backoffLimit": 0,  # the driver itself starts the run's next attempt
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": kuberay.keep_s,
        "rayClusterSpec": _cluster(plan, name),
    }


def _entrypoint(plan: Plan, name: str) -> str:
    words = ["--plan", pod_template.plan_file(), *request.limit(plan), folder(plan, name)]
    return shlex.join([*request.DRIVER, *words])


def _cluster(plan: Plan, name: str) -> Object:
    works = block(plan).head_works
    count = plans.nodes_of_job(plan) - works
    spec: Object = {"rayVersion": request.settings(plan).version, "headGroupSpec": _head(plan, name)}
    if count:
        group = {"groupName": WORKERS, "replicas": count, "minReplicas": count, "maxReplicas": count}
        spec["workerGroupSpecs"] = [
            group | {"rayStartParams": _start_params(plan), "template": _pod(plan, name, "ray-worker")}
        ]
    return spec


def _start_params(plan: Plan) -> dict[str, str]:
    """Return the CPU and GPU counts for `ray start`: those that a run reserves, instead of what Ray detects."""
    gpus = plans.gpus_per_node(plan) if plan.config.cluster.device is Device.cuda else 0
    return {"num-cpus": str(request.settings(plan).cpus_per_node), "num-gpus": str(gpus)}


def _head(plan: Plan, name: str) -> Object:
    """Return the head group; if the head runs no ranks it offers Ray no CPUs, so only drivers run there."""
    kuberay = block(plan)
    template = _pod(plan, name, "ray-head", is_alone=kuberay.head_works)
    container = template["spec"]["containers"][0]
    container["ports"] = [{"containerPort": port, "name": port_name} for port_name, port in PORTS.items()]
    sizes = _start_params(plan)
    if not kuberay.head_works:
        sizes = {"num-cpus": "0", "num-gpus": "0"}
        container["resources"] = {"requests": kuberay.head_resources, "limits": kuberay.head_resources}
        template["metadata"]["labels"].pop(names.RUN)  # by which worker pods avoid each other's nodes
    return {"rayStartParams": {"dashboard-host": "0.0.0.0"} | sizes, "template": template}


def _pod(plan: Plan, name: str, container_name: str, *, is_alone: bool = True) -> Object:
    """Return a pod template without a command; KubeRay runs `ray start` in its container."""
    place = Place(name=name, folder=folder(plan, name), node="", lead="", container=container_name, is_alone=is_alone)
    template = pod_template.template(plan, place)
    pod = template["spec"]
    pod.pop("activeDeadlineSeconds")  # the RayJob has its own
    container = pod["containers"][0]
    for key in ("command", "args"):
        container.pop(key)
    container["env"] = [one for one in container["env"] if not one["name"].startswith("RUNSTOP_")]
    if block(plan).object is RayObject.raycluster:
        pod["volumes"] = _without_plan(pod["volumes"])
        container["volumeMounts"] = _without_plan(container["volumeMounts"])
        pod.pop("restartPolicy")
    return template


def _without_plan(items: list[Any]) -> list[Any]:
    return [item for item in items if item["name"] != "plan"]
