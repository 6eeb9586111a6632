"""What the objects of a run are called, and how a job of ours is told from another by its id."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from bench.contract.cluster import Kubernetes, ObjectKind
from bench.contract.plan import Plan, fingerprint
from bench.errors import SubmitError

RUN, NODE, MANAGED = "runstop/run", "runstop/node", "app.kubernetes.io/managed-by"
"""Labels: of all objects of a job, of one node's pod, and of everything that is ours."""
FOLDER = "runstop/folder"
"""The annotation that names a run's folder on the machine that submitted it."""
QUEUE = "kueue.x-k8s.io/queue-name"
OURS = "runstop"
MAX_NAME = 40
"""Characters. Labels and names in DNS have 63; operators put up to 20 more behind the name of an object."""
_ID = re.compile(r"(?P<kind>[a-z]+)/(?P<namespace>[a-z0-9-]+)/(?P<name>[a-z0-9-]+)(?:@(?P<context>.+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobId:
    """Which objects are one job of a run; as text `job/NAMESPACE/NAME`, with @CONTEXT where the config names one."""

    kind: ObjectKind
    namespace: str
    name: str
    """Of the object; where there is one Job a node, what all of their names begin with."""
    context: str | None = None

    def __str__(self) -> str:
        return f"{self.kind.name}/{self.namespace}/{self.name}" + (f"@{self.context}" if self.context else "")


def job_id(plan: Plan, name: str) -> JobId:
    """Return the id of a job of this plan."""
    cluster = settings(plan)
    return JobId(kind=cluster.object, namespace=cluster.namespace, name=name, context=cluster.context)


def read_id(text: str) -> JobId:
    """Return the id that was written as a text.

    Raises:
        SubmitError: it is of another backend.
    """
    found = _ID.fullmatch(text)
    if found is None or found["kind"] not in ObjectKind.__members__:
        raise SubmitError("not the id of a job on Kubernetes", where=text, fix="python -m bench runs lists the jobs")
    return JobId(
        kind=ObjectKind[found["kind"]], namespace=found["namespace"], name=found["name"], context=found["context"]
    )


def settings(plan: Plan) -> Kubernetes:
    """Return the cluster's settings; those that nobody gave have their defaults."""
    return plan.config.cluster.kubernetes or Kubernetes()


def of_plan(plan: Plan) -> str:
    """Return the name of a job whose manifest somebody applies by hand; another plan has another name."""
    return dns_label(plan.name, end=fingerprint(plan)[:8])


def of_folder(folder: Path, number: int) -> str:
    """Return the name of the job that works on a run folder, the first one or a later one."""
    return dns_label(folder.name, end=fingerprint(str(folder))[:6] + (f"-{number}" if number > 1 else ""))


def dns_label(text: str, *, end: str) -> str:
    """Return a name that objects, labels and hosts can have: small letters, digits and dashes, a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    kept = f"r-{plain}"[: MAX_NAME - len(end) - 1] if not plain[:1].isalpha() else plain[: MAX_NAME - len(end) - 1]
    return f"{kept.rstrip('-')}-{end}"


def in_pods(plan: Plan, folder: Path) -> str:
    """Return a run folder as pods have it: below the results of the cluster, wherever it lies on this machine."""
    root = PurePosixPath(plan.config.cluster.paths.logs or "/")
    return str(folder) if PurePosixPath(folder).is_relative_to(root) else str(root / folder.name)


def labels(name: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the labels of all objects of a job."""
    return {MANAGED: OURS, RUN: name, **(more or {})}


def at_least(plan: Plan, version: str) -> bool:
    """Return whether the API server is promised to be so new."""
    return version_key(settings(plan).version) >= version_key(version)


def version_key(text: str) -> tuple[int, ...]:
    """Return a version as one can compare it; `v1.30.4-gke.1` is 1.30."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
