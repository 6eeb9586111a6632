"""A fake operator in place of JobSet, Kubeflow's training operator and Kubeflow Trainer.

It creates pods from their objects as the CRDs document, and writes to their status how the pods ended. Pods of a
TrainJob may post their progress, as with the Trainer's feature gate TrainJobStatus. It restarts no pods, creates no
Services, and does not import this project.
"""

import copy
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

from status_server import StatusServer

Object = dict[str, Any]
Kubectl = Callable[..., str]
RESOURCES = {
    "jobsets.jobset.x-k8s.io": "Completed",
    "pytorchjobs.kubeflow.org": "Succeeded",
    "trainjobs.trainer.kubeflow.org": "Complete",
}
"""The watched resources, and the condition type for success."""


class InvalidError(Exception):
    """The project's own webhook would refuse the object."""


def pods_of(item: Object, runtime: Callable[[str], Object]) -> Iterator[Object]:
    """Yield the pods of an object."""
    match item["kind"]:
        case "JobSet":
            yield from of_jobset(item["metadata"]["name"], item["spec"])
        case "TrainJob":
            reference, nodes = item["spec"]["runtimeRef"], item["spec"].get("trainer", {}).get("numNodes")
            if reference["kind"] != "TrainingRuntime":
                raise InvalidError(f"no {reference['kind']} here")
            spec = copy.deepcopy(runtime(reference["name"])["spec"])
            jobset = spec["template"]["spec"]
            for job in jobset["replicatedJobs"]:
                count = nodes or spec["mlPolicy"]["numNodes"]
                job["template"]["spec"] |= {"completions": count, "parallelism": count}
            yield from of_jobset(item["metadata"]["name"], jobset)
        case "PyTorchJob":
            yield from of_pytorchjob(item["metadata"]["name"], item["spec"])


def of_jobset(name: str, spec: Object) -> Iterator[Object]:
    for job in spec["replicatedJobs"]:
        if job["template"]["spec"].get("completionMode") != "Indexed":
            raise InvalidError("a JobSet's Jobs are Indexed")
        for replica in range(job.get("replicas", 1)):
            for index in range(job["template"]["spec"]["completions"]):
                host = f"{name}-{job['name']}-{replica}-{index}"
                subdomain = spec.get("network", {}).get("subdomain", name)
                template = job["template"]["spec"]["template"]
                yield pod(template, host, {"JOB_COMPLETION_INDEX": str(index)}, hostname=host, subdomain=subdomain)


def of_pytorchjob(name: str, spec: Object) -> Iterator[Object]:
    replicas = spec["pytorchReplicaSpecs"]
    if replicas.get("Master", {}).get("replicas", 1) != 1:
        raise InvalidError("a PyTorchJob has one Master")
    world = sum(one.get("replicas", 1) for one in replicas.values())
    for role, offset in (("Master", 0), ("Worker", 1)):
        for index in range(replicas.get(role, {"replicas": 0}).get("replicas", 1)):
            template = replicas[role]["template"]
            if "pytorch" not in [one["name"] for one in template["spec"]["containers"]]:
                raise InvalidError("there is no container named pytorch")
            known = {"RANK": str(index + offset), "WORLD_SIZE": str(world), "MASTER_ADDR": f"{name}-master-0"}
            yield pod(template, f"{name}-{role.lower()}-{index}", known | {"MASTER_PORT": "23456"})


def pod(template: Object, name: str, environment: dict[str, str], **spec: Any) -> Object:
    item = copy.deepcopy(template)
    item["metadata"] = item.get("metadata", {}) | {"name": name}
    item["spec"] |= {"restartPolicy": "Never"} | spec
    for container in item["spec"]["containers"]:
        container["env"] = [*container.get("env", []), *({"name": k, "value": v} for k, v in environment.items())]
    return {"apiVersion": "v1", "kind": "Pod", **item}


class SmallOperator(threading.Thread):
    """Reconciles all objects of a namespace until `end` is called."""

    def __init__(self, kubectl: Kubectl) -> None:
        super().__init__(daemon=True)
        self._kubectl, self._done, self._made = kubectl, threading.Event(), set[str]()
        self.status_server = StatusServer(kubectl)

    def run(self) -> None:
        while not self._done.wait(1.0):
            for resource, fine in RESOURCES.items():
                for item in self._get(resource):
                    self._reconcile(resource, item, fine)

    def end(self) -> None:
        self._done.set()
        self.join()
        self.status_server.end()

    def _get(self, *words: str) -> list[Object]:
        output = self._kubectl("get", *words, "--output", "json", check=False)
        return list(json.loads(output)["items"]) if output else []

    def _runtime(self, name: str) -> Object:
        return dict(json.loads(self._kubectl("get", "trainingruntimes.trainer.kubeflow.org", name, "--output", "json")))

    def _reconcile(self, resource: str, item: Object, fine: str) -> None:
        uid, name = item["metadata"]["uid"], item["metadata"]["name"]
        if uid not in self._made:
            self._made.add(uid)
            owner = {"apiVersion": item["apiVersion"], "kind": item["kind"], "name": name, "uid": uid}
            if item["kind"] == "TrainJob":
                config = {"apiVersion": "v1", "kind": "ConfigMap", **self.status_server.certificate(item)}
                config["metadata"]["ownerReferences"] = [owner]
                self._kubectl("create", "--filename", "-", stdin=json.dumps(config))
            for one in pods_of(item, self._runtime):
                one["metadata"]["ownerReferences"] = [owner]
                if item["kind"] == "TrainJob":
                    self.status_server.configure(one, item)
                self._kubectl("create", "--filename", "-", stdin=json.dumps(one))
        own = [p for p in self._get("pods") if uid in [o["uid"] for o in p["metadata"].get("ownerReferences", [])]]
        phases = {pod["status"]["phase"] for pod in own}
        if own and phases <= {"Succeeded", "Failed"} and not item.get("status", {}).get("conditions"):
            condition = {"type": fine if phases == {"Succeeded"} else "Failed", "status": "True", "reason": "PodsEnded"}
            condition |= {"message": "all pods have ended", "lastTransitionTime": item["metadata"]["creationTimestamp"]}
            status = json.dumps({"status": {"conditions": [condition]}})
            self._kubectl("patch", resource, name, "--subresource=status", "--type=merge", "--patch", status)
