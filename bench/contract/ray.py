"""Where a Ray cluster is, what a run asks of each of its nodes, and what Ray passes on to them."""

from dataclasses import dataclass, field
from enum import Enum


class RayCode(Enum):
    """Where the nodes get this program from.

    uploaded: from whoever submits, with the job (py_modules), so that every node has the same.
    installed: it is part of the nodes' image or environment.
    """

    uploaded = "uploaded"
    installed = "installed"


class RaySubmission(Enum):
    """How KubeRay hands a RayJob's entrypoint to the Ray cluster that it has made."""

    sidecar = "SidecarMode"
    k8s_job = "K8sJobMode"
    http = "HTTPMode"


class RayObject(Enum):
    """What a manifest makes: a run with a cluster of its own, or a cluster that stays, for runs that are sent to it."""

    rayjob = "rayjob"
    raycluster = "raycluster"


@dataclass(slots=True, kw_only=True)
class KubeRay:
    """The Ray cluster that KubeRay makes from a manifest; cluster.kubernetes says what its pods are."""

    object: RayObject = RayObject.rayjob
    submission: RaySubmission = RaySubmission.sidecar
    head_works: bool = False
    """The head's pod is one of the run's nodes; else it has no GPU, and every node is a worker's pod."""
    head_resources: dict[str, str] = field(default_factory=lambda: {"cpu": "4", "memory": "16Gi"})
    """Of the head's pod where it does not work."""
    keep_s: int = 60
    """How long the cluster of a run stays once that has ended, with all that it holds."""


@dataclass(slots=True, kw_only=True)
class Ray:
    """A Ray cluster that is there, by its address, or one that KubeRay makes."""

    address: str | None = None
    """Of the dashboard, which takes jobs: http://HEAD:8265."""
    cpus_per_node: int = 1
    """What the ranks of a node reserve of its CPUs. Their GPUs are reserved by cluster.ranks_per_node."""
    resources: dict[str, float] = field(default_factory=dict)
    """More that each node must have, such as accelerator_type:H100: 0.001."""
    environment: list[str] = field(default_factory=list)
    """Names of variables that the job gets from whoever submits it; whoever reads the dashboard sees their values."""
    code: RayCode = RayCode.uploaded
    placement_timeout_min: int = 30
    """How long a job waits for all of its nodes at once."""
    version: str = "2.60.0"
    """Ray's, of the pods that KubeRay makes; a cluster that is there says its own."""
    kuberay: KubeRay | None = None
