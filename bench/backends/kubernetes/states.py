"""The states of jobs: one request lists the objects of all runs, a second one lists the pods of unfinished runs.

The status of a workload object shows whether it is active, complete or failed, and why it failed. The status of its
pods shows what they wait for, on which nodes they run, and how their containers ended.
"""

import re
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from bench.backends.kubernetes import client, names
from bench.backends.kubernetes.names import JobId
from bench.backends.protocol import Job, JobState
from bench.contract.cluster import ObjectKind

Object = dict[str, Any]
KINDS = {
    ObjectKind.job: "Job",
    ObjectKind.jobset: "JobSet",
    ObjectKind.pytorchjob: "PyTorchJob",
    ObjectKind.trainjob: "TrainJob",
}
COMPLETE, FAILED = ("Complete", "Completed", "Succeeded"), ("Failed",)
"""The condition types, of any kind of object, that mean that it has ended."""
RULE_OF = {
    **dict.fromkeys(("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName"), "KUB-01"),
    **dict.fromkeys(("CreateContainerConfigError", "CreateContainerError", "RunContainerError"), "KUB-10"),
    **dict.fromkeys(("ContainerCannotRun", "StartError", "FailedMount"), "KUB-10"),
    **dict.fromkeys(("Evicted", "Preempting", "PreemptionByScheduler"), "KUB-04"),
    "Unschedulable": "KUB-02",
    "OOMKilled": "KUB-03",
    "CrashLoopBackOff": "KUB-05",
    "DeadlineExceeded": "KUB-09",
    "FailedCreate": "KUB-11",
    "NodeLost": "KUB-13",
}
"""The rule for each `reason` in a Kubernetes status."""
CLAIM = re.compile(r"persistentvolumeclaim|PersistentVolumeClaim|volume")
"""In a scheduler's message: the pod waits for a volume."""
LOST_S = 10.0
"""A pod that still exists this long after its termination grace period is on a lost node."""


def states(ids: Sequence[str]) -> dict[str, Job]:
    """Return jobs by id; those that the cluster does not know are left out.

    Raises:
        SubmitError: the API server cannot be queried.
    """
    names_to_ids: dict[tuple[str | None, str, ObjectKind], dict[str, str]] = defaultdict(dict)
    for text in dict.fromkeys(ids):
        job = names.read_id(text)
        names_to_ids[job.context, job.namespace, job.kind][job.name] = text
    jobs: dict[str, Job] = {}
    for (context, namespace, kind), by_name in names_to_ids.items():
        listed = partial(client.listed, namespace=namespace, context=context, selector=f"{names.MANAGED}={names.OURS}")
        objects = _by_run(listed(KINDS[kind]), by_name)
        open_ones = {name for name, some in objects.items() if not _is_complete(some)}
        pods = _by_run(listed("Pod"), open_ones) if open_ones else {}
        lacking = any(len(pods.get(name, [])) < _num_pods(objects[name]) for name in open_ones)
        refused = _refusals(namespace, context) if lacking else {}
        for name, some in objects.items():
            refusal = next((refused[one] for one in map(_name, some) if one in refused), ("", ""))
            jobs[by_name[name]] = _job(by_name[name], some, pods.get(name, []), refusal)
    return jobs


def _name(item: Object) -> str:
    return str(item["metadata"]["name"])


def _num_pods(objects: Iterable[Object]) -> int:
    """Return how many pods the controllers of a run's objects should have created at least."""
    return sum((one.get("spec") or {}).get("parallelism") or 1 for one in objects)


def _refusals(namespace: str, context: str | None) -> dict[str, tuple[str, str]]:
    """Return reason and message, by object, where pods could not be created because of a quota or an admission rule."""
    query = {"fieldSelector": "reason=FailedCreate"}
    events = client.request("GET", client.path_of("Event", namespace), context=context, query=query)["items"]
    return {one["involvedObject"]["name"]: ("FailedCreate", _one_line(one.get("message"))) for one in events}


def active(job: JobId) -> bool:
    """Return whether a job is queued or running."""
    known = states([str(job)]).get(str(job))
    return known is not None and known.state.is_active


def objects_of(job: JobId, kind: str) -> list[Object]:
    """Return the objects of one kind that belong to a job."""
    return client.listed(kind, job.namespace, context=job.context, selector=f"{names.RUN}={job.name}")


def reason_of(pods: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return Kubernetes' reason and message why pods wait or have failed; empty strings if there is none."""
    reasons = [reason for pod in pods if (reason := _reason_of_pod(pod))[0]]
    return next((one for one in reasons if one[0] in RULE_OF), reasons[0] if reasons else ("", ""))


def rule_of(reason: str, message: str) -> str:
    """Return the id of the rule that explains a reason; empty if no rule does."""
    if reason == "Unschedulable" and CLAIM.search(message):
        return "KUB-08"
    return RULE_OF.get(reason, "")


def _by_run(objects: Iterable[Object], wanted: Container[str]) -> dict[str, list[Object]]:
    by_run: dict[str, list[Object]] = defaultdict(list)
    for one in objects:
        name = one["metadata"].get("labels", {}).get(names.RUN)
        if name in wanted:
            by_run[name].append(one)
    return dict(by_run)


def _is_complete(objects: Iterable[Object]) -> bool:
    return all((end := _end(one)) is not None and end["type"] in COMPLETE for one in objects)


def _end(item: Object) -> Object | None:
    """Return the condition that shows how an object ended; None if it has not ended."""
    conditions = (item.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] in (*COMPLETE, *FAILED) and c["status"] == "True"), None)


def _job(id: str, objects: Sequence[Object], pods: Sequence[Object], refused: tuple[str, str]) -> Job:
    """Return a job's state from its objects (one, or one per node), their pods, and why pods could not be created."""
    ends = [end for one in objects if (end := _end(one))]
    failed = next((end for end in ends if end["type"] in FAILED), None)
    nodes = ",".join(sorted({node for pod in pods if (node := (pod.get("spec") or {}).get("nodeName"))}))
    known: dict[str, Any] = {"id": id, "nodes": nodes, "start": min(map(_started, objects)), **_times(objects, ends)}
    reason, message = reason_of(pods)
    reason, message = (reason, message) if reason else refused
    known |= {"reason": message, "rule": rule_of(reason, message)}
    if failed:
        known["reason"] = message or _one_line(failed.get("message"))
        return Job(state=JobState.failed, native_state=reason or str(failed.get("reason") or "Failed"), **known)
    if len(ends) == len(objects):
        return Job(state=JobState.completed, native_state="Complete", **known)
    if _running(pods):
        return Job(state=JobState.running, native_state=reason if known["rule"] else "Running", **known)
    suspended = any((one.get("spec") or {}).get("suspend") for one in objects)
    return Job(state=JobState.queued, native_state=reason or ("Suspended" if suspended else "Pending"), **known)


def _running(pods: Iterable[Object]) -> bool:
    return any((pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed") for pod in pods)


def _started(item: Object) -> str:
    return str((item.get("status") or {}).get("startTime") or item["metadata"].get("creationTimestamp") or "")


def _times(objects: Sequence[Object], ends: Sequence[Object]) -> dict[str, int]:
    """Return the elapsed time of a job, up to now or to its end."""
    begun = _seconds(min(map(_started, objects)))
    stamps = [_seconds(str(end.get("lastTransitionTime") or "")) for end in ends]
    last = max(stamps, default=0.0) if len(ends) == len(objects) else time.time()
    return {"elapsed_s": int(last - begun)} if begun and last >= begun else {}


def _seconds(stamp: str) -> float:
    try:
        return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0


def _reason_of_pod(pod: Mapping[str, Any]) -> tuple[str, str]:
    """Return reason and message why a pod waits or how it failed."""
    status = pod.get("status") or {}
    deletion_s = _seconds(str(pod["metadata"].get("deletionTimestamp") or ""))
    if deletion_s and time.time() > deletion_s + LOST_S:
        node = (pod.get("spec") or {}).get("nodeName")
        return "NodeLost", f"node {node} does not terminate pod {pod['metadata']['name']}"
    if status.get("reason"):
        return str(status["reason"]), _one_line(status.get("message"))
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return str(waiting["reason"]), _one_line(waiting.get("message"))
            if ended.get("reason") not in (None, "Completed"):
                return str(ended["reason"]), _one_line(ended.get("message"))
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("reason") or ""), _one_line(condition.get("message"))
    return "", ""


def _one_line(text: Any) -> str:
    """Return the last 400 characters of a message on one line; a container's message is the end of its log."""
    return " ".join(str(text or "").split())[-400:]
