"""What a Kubernetes cluster wants of a run's pods, and what it gives them. Each node of the run is one pod."""

from dataclasses import dataclass, field
from enum import Enum


class ObjectKind(Enum):
    """The kind of object that becomes the pods; all but `job` need their operator in the cluster."""

    job = "job"
    """batch/v1: an Indexed Job, or one Job a node where the API server is older than Kubernetes 1.24."""
    jobset = "jobset"
    """jobset.x-k8s.io/v1alpha2."""
    pytorchjob = "pytorchjob"
    """kubeflow.org/v1, of Kubeflow's training operator."""
    trainjob = "trainjob"
    """trainer.kubeflow.org/v1alpha1, of Kubeflow Trainer, with a TrainingRuntime of the run's own."""


class Discovery(Enum):
    """How pods find the first one of them.

    service: by its name in the cluster's DNS, which a headless Service gives it.
    file: by the address that it writes into the run folder, where the cluster has no DNS.
    """

    service = "service"
    file = "file"


@dataclass(slots=True, kw_only=True)
class Volume:
    """Where a folder of pods lies: in a PersistentVolumeClaim, or in a folder that every node has. One of the two."""

    claim: str | None = None
    host_path: str | None = None
    sub_path: str | None = None
    """A folder in the claim."""


@dataclass(slots=True, kw_only=True)
class Toleration:
    """A taint of nodes that pods put up with; without a value every taint of the key."""

    taint: str
    """Its key."""
    value: str | None = None
    effect: str | None = None


@dataclass(slots=True, kw_only=True)
class Kubernetes:
    """Settings of the cluster, which all go into the manifest, and the context, which is the client's."""

    context: str | None = None
    """Of the kubeconfig; None: its current one."""
    namespace: str = "default"
    version: str = "1.31"
    """What the API server is, at least: newer fields are left out of the manifest."""
    object: ObjectKind = ObjectKind.job
    image: str | None = None
    """By its digest (name@sha256:…), so that it is the same image tomorrow."""
    image_pull_secrets: list[str] = field(default_factory=list)
    """The names of Secrets with the registry's credentials."""
    env_from_secrets: list[str] = field(default_factory=list)
    """The names of Secrets whose keys become variables of the ranks, such as HF_TOKEN."""
    gpu_resource: str | None = "nvidia.com/gpu"
    """What a GPU is called among the resources of nodes; amd.com/gpu for AMD's."""
    resources: dict[str, str] = field(default_factory=dict)
    """More that each pod gets, such as cpu, memory, or the RDMA devices rdma/rdma_shared_device_a."""
    capabilities: list[str] = field(default_factory=list)
    """Of Linux, that are added for the container; RDMA wants IPC_LOCK."""
    networks: list[str] = field(default_factory=list)
    """Of Multus, beside the pod's own: names of NetworkAttachmentDefinitions."""
    node_selector: dict[str, str] = field(default_factory=dict)
    exclude_nodes: list[str] = field(default_factory=list)
    tolerations: list[Toleration] = field(default_factory=list)
    priority_class: str | None = None
    queue: str | None = None
    """The LocalQueue of Kueue that admits the run."""
    service_account: str | None = None
    run_as_user: int = 1000
    run_as_group: int | None = None
    """None: as the user."""
    shm_gib: int = 64
    """Of /dev/shm, in the memory of the pod: NCCL and data loaders take it."""
    data: Volume | None = None
    """Mounted at cluster.paths.data; read-only, unless the run makes its rows."""
    model: Volume | None = None
    """Mounted at cluster.paths.model; read-only, unless the run makes its base checkpoint."""
    results: Volume | None = None
    """Mounted at cluster.paths.logs; all pods of a run write there."""
    host_network: bool = False
    """Pods have the network of their nodes, with its RDMA devices and none of the cluster's DNS policy."""
    discovery: Discovery = Discovery.service
    port: int = 29400
    """Where the first pod listens for the others."""
    grace_s: int = 60
    """How long a pod has to write its last words when it is told to end."""
    keep_h: int = 168
    """How long the cluster keeps a run's objects once it has ended."""
