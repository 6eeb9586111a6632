"""Where jobs stand: the objects of all runs by one request, and their pods by another one where objects say too little.

An object that works on a run says that it is active, complete or failed, and why it failed. Its pods say what it waits
for, on which nodes they are, and how their containers ended.
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
"""The types of conditions, of any kind of object, that say that it has ended."""
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
"""The rules behind what Kubernetes calls the reason of a state."""
CLAIM = re.compile(r"persistentvolumeclaim|PersistentVolumeClaim|volume")
"""What a scheduler's words are about where it waits for a volume."""
LOST_S = 10.0
"""How long after its grace a pod that was told to end may still be there; then nobody on its node answers."""


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
        listed = partial(client.listed, namespace=namespace, context=context, selector=f"{names.MANAGED}={names.OURS}")
        objects = _by_run(listed(KINDS[kind]), by_name)
        open_ones = {name for name, some in objects.items() if not _is_complete(some)}
        pods = _by_run(listed("Pod"), open_ones) if open_ones else {}
        lacking = any(len(pods.get(name, [])) < _num_pods(objects[name]) for name in open_ones)
        refused = _refusals(namespace, context) if lacking else {}
        for name, some in objects.items():
            told = next((refused[one] for one in map(_name, some) if one in refused), ("", ""))
            found[by_name[name]] = _job(by_name[name], some, pods.get(name, []), told)
    return found


def _name(made: Object) -> str:
    return str(made["metadata"]["name"])


def _num_pods(objects: Iterable[Object]) -> int:
    """Return how many pods a run's objects have at least, if nothing keeps their controllers from making them."""
    return sum((one.get("spec") or {}).get("parallelism") or 1 for one in objects)


def _refusals(namespace: str, context: str | None) -> dict[str, tuple[str, str]]:
    """Return for which objects no pods may be made, and why: a quota, or a rule of the cluster."""
    query = {"fieldSelector": "reason=FailedCreate"}
    events = client.request("GET", client.path_of("Event", namespace), context=context, query=query)["items"]
    return {one["involvedObject"]["name"]: ("FailedCreate", _words(one.get("message"))) for one in events}


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
    return next((one for one in found if one[0] in RULE_OF), found[0] if found else ("", ""))


def rule_of(word: str, message: str) -> str:
    """Return the rule behind a reason."""
    if word == "Unschedulable" and CLAIM.search(message):
        return "KUB-08"
    return RULE_OF.get(word, "")


def _by_run(objects: Iterable[Object], wanted: Container[str]) -> dict[str, list[Object]]:
    found: dict[str, list[Object]] = defaultdict(list)
    for one in objects:
        name = one["metadata"].get("labels", {}).get(names.RUN)
        if name in wanted:
            found[name].append(one)
    return dict(found)


def _is_complete(objects: Iterable[Object]) -> bool:
    return all((end := _end(one)) is not None and end["type"] in COMPLETE for one in objects)


def _end(made: Object) -> Object | None:
    """Return the condition that says how an object ended."""
    conditions = (made.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] in (*COMPLETE, *FAILED) and c["status"] == "True"), None)


def _job(id: str, objects: Sequence[Object], pods: Sequence[Object], refused: tuple[str, str]) -> Job:
    """Return the state of a job from all of its objects (one, or one a node), their pods, and why there are none."""
    ends = [end for one in objects if (end := _end(one))]
    failed = next((end for end in ends if end["type"] in FAILED), None)
    nodes = ",".join(sorted({node for pod in pods if (node := (pod.get("spec") or {}).get("nodeName"))}))
    known: dict[str, Any] = {"id": id, "nodes": nodes, "start": min(map(_started, objects)), **_times(objects, ends)}
    word, message = explained(pods)
    word, message = (word, message) if word else refused
    known |= {"reason": message, "rule": rule_of(word, message)}
    if failed:
        known["reason"] = message or _words(failed.get("message"))
        return Job(state=JobState.failed, word=word or str(failed.get("reason") or "Failed"), **known)
    if len(ends) == len(objects):
        return Job(state=JobState.completed, word="Complete", **known)
    if _running(pods):
        return Job(state=JobState.running, word=word if known["rule"] else "Running", **known)
    suspended = any((one.get("spec") or {}).get("suspend") for one in objects)
    return Job(state=JobState.queued, word=word or ("Suspended" if suspended else "Pending"), **known)


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
    told = _seconds(str(pod["metadata"].get("deletionTimestamp") or ""))
    if told and time.time() > told + LOST_S:
        return "NodeLost", f"{(pod.get('spec') or {}).get('nodeName')} does not end {pod['metadata']['name']}"
    if status.get("reason"):
        return str(status["reason"]), _words(status.get("message"))
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            waiting, ended = state.get("waiting") or {}, state.get("terminated") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return str(waiting["reason"]), _words(waiting.get("message"))
            if ended.get("reason") not in (None, "Completed"):
                return str(ended["reason"]), _words(ended.get("message"))
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("reason") or ""), _words(condition.get("message"))
    return "", ""


def _words(text: Any) -> str:
    """Return a message on one line; of the end of a container's output, its end."""
    return " ".join(str(text or "").split())[-400:]
