"""Names and labels of a run's Kubernetes objects, and the ids of jobs."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bench.contract.cluster import Kubernetes, ObjectKind
from bench.contract.plan import Plan, fingerprint
from bench.errors import SubmitError

RUN, NODE, MANAGED = "runstop/run", "runstop/node", "app.kubernetes.io/managed-by"
"""Labels: of all objects of a job, of one node's pod, and of all objects that runstop creates."""
FOLDER = "runstop/folder"
"""The annotation that names a run's folder on the machine that submitted it."""
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
"""Labels by which Kueue admits a workload: its LocalQueue and its WorkloadPriorityClass."""
OURS = "runstop"
MAX_NAME = 40
"""Characters. DNS labels have at most 63; operators append up to 20 to the name of an object."""
_ID = re.compile(r"(?P<kind>[a-z]+)/(?P<namespace>[a-z0-9-]+)/(?P<name>[a-z0-9-]+)(?:@(?P<context>.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobId:
    """The id of a job; as text `job/NAMESPACE/NAME`, with @CONTEXT if the config sets a kubeconfig context."""

    kind: ObjectKind
    namespace: str
    name: str
    """The object's name; with one Job per node, the common prefix of their names."""
    context: str | None = None

    def __str__(self) -> str:
        return f"{self.kind.name}/{self.namespace}/{self.name}" + (f"@{self.context}" if self.context else "")


def job_id(plan: Plan, name: str) -> JobId:
    cluster = settings(plan)
    return JobId(kind=cluster.object, namespace=cluster.namespace, name=name, context=cluster.context)


def read_id(text: str) -> JobId:
    """Parse a job id.

    Raises:
        SubmitError: it is not the id of a Kubernetes job.
    """
    match = _ID.fullmatch(text)
    if match is None or match["kind"] not in ObjectKind.__members__:
        raise SubmitError(
            f"{text!r:.80} is not the id of a Kubernetes job", where="job id", fix="list the jobs with `runstop runs`"
        )
    return JobId(
        kind=ObjectKind[match["kind"]], namespace=match["namespace"], name=match["name"], context=match["context"]
    )


def excluded(plan: Plan) -> list[str]:
    """Return the nodes that get no pod of the run: those of the settings, and those of cluster.avoid."""
    return [*settings(plan).exclude_nodes, *plan.config.cluster.avoided]


def settings(plan: Plan) -> Kubernetes:
    """Return the cluster's Kubernetes settings, or the defaults if the config has none."""
    return plan.config.cluster.kubernetes or Kubernetes()


def of_plan(plan: Plan) -> str:
    """Return the name of a job that the user starts with `kubectl apply`; it differs for different plans."""
    return dns_label(plan.name, end=fingerprint(plan)[:8])


def of_folder(folder: Path, number: int) -> str:
    """Return the name of the first or a later job of a run folder."""
    return dns_label(folder.name, end=fingerprint(str(folder))[:6] + (f"-{number}" if number > 1 else ""))


def dns_label(text: str, *, end: str) -> str:
    """Return a valid DNS label: lower-case letters, digits and dashes, starting with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    kept = f"r-{plain}"[: MAX_NAME - len(end) - 1] if not plain[:1].isalpha() else plain[: MAX_NAME - len(end) - 1]
    return f"{kept.rstrip('-')}-{end}"


def is_place(annotation: str, folder: Path) -> bool:
    """Return whether an annotation names a run folder; it may be relative to the directory of the submission."""
    place, parts = Path(annotation), folder.absolute().parts
    with suppress(OSError):
        if place.is_absolute() and place.samefile(folder):
            return True
    return bool(place.parts) and parts[-len(place.parts) :] == place.parts


def in_pods(plan: Plan, folder: Path) -> str:
    """Return the path of a run folder in pods: below the cluster's results folder, whatever its path here."""
    root = PurePosixPath(plan.config.cluster.paths.logs or "/")
    return str(folder) if PurePosixPath(folder).is_relative_to(root) else str(root / folder.name)


def labels(name: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    return {MANAGED: OURS, RUN: name, **(more or {})}


def queue_labels(plan: Plan) -> dict[str, str]:
    """Return the labels for Kueue of the object that it admits."""
    cluster = settings(plan)
    values = {QUEUE: cluster.queue, PRIORITY: cluster.workload_priority_class}
    return {key: value for key, value in values.items() if value is not None}


def at_least(plan: Plan, version: str) -> bool:
    """Return whether the configured API server version is at least `version`."""
    return version_key(settings(plan).version) >= version_key(version)


def version_key(text: str) -> tuple[int, ...]:
    """Return major and minor version for comparisons; `v1.30.4-gke.1` is (1, 30)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
