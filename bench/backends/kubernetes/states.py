"""Where jobs stand: the objects of all runs by one request, and their pods by another one where objects say too little.

An object that works on a run says that it is active, complete or failed, and why it failed. Its pods say what it waits
for, on which nodes they are, and how their containers ended.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from bench.backends.kubernetes import client, names
from bench.backends.kubernetes.names import JobId
from bench.backends.protocol import Job, JobState
from bench.contract.kubernetes import ObjectKind

Object = dict[str, Any]
KINDS = {
    ObjectKind.job: "Job",
    ObjectKind.jobset: "JobSet",
    ObjectKind.pytorchjob: "PyTorchJob",
    ObjectKind.trainjob: "TrainJob",
}
COMPLETE, FAILED = ("Complete", "Completed", "Succeeded"), ("Failed",)
"""The types of conditions, of any kind of object, that say that it has ended."""
WAITING_RULES = {
    "ImagePullBackOff": "KUB-01",
    "ErrImagePull": "KUB-01",
    "ErrImageNeverPull": "KUB-01",
    "InvalidImageName": "KUB-01",
    "CrashLoopBackOff": "KUB-05",
    "CreateContainerConfigError": "KUB-10",
    "CreateContainerError": "KUB-10",
    "RunContainerError": "KUB-10",
    "Unschedulable": "KUB-02",
    "OOMKilled": "KUB-03",
    "Evicted": "KUB-04",
    "Preempting": "KUB-04",
    "DeadlineExceeded": "KUB-09",
    "FailedCreate": "KUB-11",
    "NodeLost": "KUB-13",
}
"""The rules behind what Kubernetes calls the reason of a state."""


def states(ids: Sequence[str]) -> dict[str, Job]:
    """Return where jobs stand, by id; those that the cluster does not know are left out.

    Raises:
        SubmitError: the API server cannot be asked.
    """
    wanted: dict[tuple[str | None, str, ObjectKind], dict[str, str]] = defaultdict(dict)
    for text in dict.fromkeys(ids):
        job = names.read_id(text)
        wanted[job.context, job.namespace, job.kind][job.name] = text
    found: dict[str, Job] = {}
    for (context, namespace, kind), by_name in wanted.items():
        objects = _by_run(client.listed(KINDS[kind], namespace, context=context, selector=_ours()), by_name)
        is_waiting = any(not _has_ended(some) for some in objects.values())
        pods = (
            _by_run(client.listed("Pod", namespace, context=context, selector=_ours()), by_name) if is_waiting else {}
        )
        found |= {by_name[name]: _job(by_name[name], some, pods.get(name, [])) for name, some in objects.items()}
    return found


def active(job: JobId) -> bool:
    """Return whether the cluster has a job that waits or runs."""
    found = states([str(job)]).get(str(job))
    return found is not None and found.state.is_active


def objects_of(job: JobId, kind: str) -> list[Object]:
    """Return the objects of one kind that belong to a job."""
    return client.listed(kind, job.namespace, context=job.context, selector=f"{names.RUN}={job.name}")


def explained(pods: Iterable[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the reason for which pods wait or have failed, as Kubernetes calls it, and its words; or nothing."""
    found = [reason for pod in pods if (reason := _reason_of_pod(pod))[0]]
    return next((one for one in found if one[0] in WAITING_RULES), found[0] if found else ("", ""))


def _ours() -> str:
    return f"{names.MANAGED}={names.OURS}"


def _by_run(objects: Iterable[Object], wanted: Mapping[str, str]) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = defaultdict(list)
    for one in objects:
        name = one["metadata"].get("labels", {}).get(names.RUN)
        if name in wanted:
            found[name].append(one)
    return dict(found)


def _has_ended(objects: Iterable[Object]) -> bool:
    conditions = [_end(one) for one in objects]
    return all(conditions) or any(condition and condition["type"] in FAILED for condition in conditions)


def _end(made: Object) -> Object | None:
    """Return the condition that says how an object ended."""
    conditions = (made.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] in (*COMPLETE, *FAILED) and c["status"] == "True"), None)


def _job(id: str, objects: Sequence[Object], pods: Sequence[Object]) -> Job:
    """Return the state of a job from all of its objects (one, or one a node) and their pods."""
    ends = [end for one in objects if (end := _end(one))]
    failed = next((end for end in ends if end["type"] in FAILED), None)
    nodes = ",".join(sorted({node for pod in pods if (node := (pod.get("spec") or {}).get("nodeName"))}))
    known: dict[str, Any] = {"id": id, "nodes": nodes, "start": min(map(_started, objects)), **_times(objects, ends)}
    if failed:
        word = str(failed.get("reason") or "Failed")
        return Job(state=JobState.failed, word=word, reason=_words(failed.get("message")), **known)
    if len(ends) == len(objects):
        return Job(state=JobState.completed, word="Complete", **known)
    reason, message = explained(pods)
    if _running(pods):
        return Job(state=JobState.running, word="Running", reason=reason, **known)
    suspended = any((one.get("spec") or {}).get("suspend") for one in objects)
    word = reason or ("Suspended" if suspended else "Pending")
    return Job(state=JobState.queued, word=word, reason=message, **known)


def _running(pods: Iterable[Object]) -> bool:
    return any((pod.get("status") or {}).get("phase") in ("Running", "Succeeded", "Failed") for pod in pods)


def _started(made: Object) -> str:
    return str((made.get("status") or {}).get("startTime") or made["metadata"].get("creationTimestamp") or "")


def _times(objects: Sequence[Object], ends: Sequence[Object]) -> dict[str, int]:
    """Return how long a job has taken so far, or took."""
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
    """Return why a pod waits, or how it failed."""
    status = pod.get("status") or {}
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return str(waiting["reason"]), _words(waiting.get("message"))
            if ended.get("reason") not in (None, "Completed", "Error"):
                return str(ended["reason"]), _words(ended.get("message"))
    if status.get("reason"):
        return str(status["reason"]), _words(status.get("message"))
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("reason") or ""), _words(condition.get("message"))
    return "", ""


def _words(text: Any) -> str:
    return " ".join(str(text or "").split())[:300]
