"""Where a run happens: GPUs, hosts, Slurm, Kubernetes and Ray."""

import re
from dataclasses import dataclass, field
from enum import Enum

from bench.errors import ConfigError


class GpuRequest(Enum):
    """How this site's Slurm is asked for GPUs."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"
    gres_typed = "gres_typed"
    none = "none"


@dataclass(slots=True, kw_only=True)
class Slurm:
    """Settings of the site, which go into the script, and of one user, which go only onto sbatch's command line."""

    partition: str | None = None
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    gpu_type: str | None = None
    """As `scontrol show node` has it (Gres=gpu:h100:8); for gpu_request=gres_typed."""
    exclusive: bool = True
    """Whole nodes, with all of their memory."""
    cpus_per_rank: int | None = None
    max_walltime_min: int | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    arguments: list[str] = field(default_factory=list)
    """More for sbatch, such as --exclude=dgx-7 or --time=20."""


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


_HOST = re.compile(r"(?P<name>(?:[\w.-]+@)?\w[\w.-]*)(?::(?P<groups>[1-9]\d{0,3})x(?P<size>[1-9]\d{0,3}))?", re.ASCII)


@dataclass(slots=True, kw_only=True)
class Ssh:
    """How hosts are reached, by the system's ssh."""

    python: str | None = None
    """The interpreter on every host that has this package; None: the one that starts the run, at the same path."""
    options: list[str] = field(default_factory=list)
    """More for ssh, such as -F FILE."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host, and the GPUs that it gives: so many groups, each of so many. Without groups all ranks are alike."""

    name: str
    groups: int | None = None
    group_size: int | None = None

    @property
    def num_ranks(self) -> int | None:
        """One rank for each GPU of each group; None where the cluster says how many."""
        return self.groups * self.group_size if self.groups and self.group_size else None


def parsed(text: str) -> Host:
    """Return a host as users write it: rig0, me@rig0.site, or rig0:2x4 for two groups of four GPUs.

    Raises:
        ConfigError: it is none.
    """
    found = _HOST.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{text!r} is not a host",
            where="cluster.hosts",
            fix="write NAME, USER@NAME, or NAME:GROUPSxGPUS such as rig0:2x4",
        )
    groups, size = found["groups"], found["size"]
    return Host(found["name"], int(groups) if groups else None, int(size) if size else None)


def require_even(hosts: list[str], *, num_nodes: int, ranks_per_node: int) -> None:
    """Raise ConfigError unless these are as many hosts as the cluster has nodes, each once, with its ranks per node."""
    every = [parsed(text) for text in hosts]
    names = [host.name for host in every]
    if len(set(names)) < len(names):
        raise ConfigError(f"{', '.join(names)}: a host twice", where="cluster.hosts", fix="name each host once")
    if len(every) != num_nodes:
        what = f"{len(every)} hosts, and cluster.num_nodes is {num_nodes}"
        raise ConfigError(what, where="cluster.hosts", fix=f"set cluster.num_nodes={len(every)}, or name as many hosts")
    for host in every:
        if host.num_ranks is not None and host.num_ranks != ranks_per_node:
            counts = {other.num_ranks for other in every}
            same = f"set cluster.ranks_per_node={host.num_ranks}"
            fix = same if len(counts) == 1 else "give every host as many GPUs: all nodes of a plan are alike"
            what = f"{host.name} gives {host.groups} x {host.group_size} GPUs, and a node has {ranks_per_node} ranks"
            raise ConfigError(what, where="cluster.hosts", fix=fix)


@dataclass(slots=True, kw_only=True)
class Rates:
    """Measured rates of an accelerator, to estimate the step time. Sizes rise; rates between them are interpolated.

    A rate measured inside a step, with a hot GPU and cold caches, is better than that of a kernel alone; `source` says
    which one it is.
    """

    source: str
    layer_tflop: list[float]
    """TFLOP of all GEMMs of one layer in a forward pass; bf16_tflops and fp8_tflops are the rates at these sizes."""
    bf16_tflops: list[float]
    fp8_tflops: list[float]
    attention_forward_tflops: float
    attention_backward_tflops: float
    """Of causal attention in BF16 in rows of 8192 tokens; masked scores are not counted as work."""
    copy_gbs: float
    """Device memory, bytes read plus bytes written."""
    busbw_mib: list[float]
    busbw_gbs: list[float]
    """All-reduce bus bandwidth in one node, by size of the message."""
    launch_us: float
    """Host time per kernel of an FP8 layer, with all of Python; kernels may run faster than the host launches them."""
    host_gbs: float | None = None
    """Between host and device memory, one way; both ways go on at once. None: not measured."""
    fp8_weight_gradient_tflops: float | None = None
    """Of the GEMMs that add FP8 weight gradients to FP32 ones. None: not measured, and fp8_tflops is taken."""
    attention_forward_4096_tflops: float | None = None
    attention_backward_4096_tflops: float | None = None
    """In rows of 4096 tokens; shorter rows are extrapolated. None: not measured, and the rates at 8192 are taken."""
    elementwise_gbs: float | None = None
    """Device memory in the element-wise kernels of a step. None: not measured, and copy_gbs is taken."""


@dataclass(slots=True, kw_only=True)
class Gpu:
    """One accelerator; dense peak rates, without sparsity."""

    name: str
    memory_gib: float
    peak_bf16_tflops: float
    peak_fp8_tflops: float | None = None
    """None: it does not multiply in FP8, and precision=fp8 is refused."""
    source: str
    rates: Rates | None = None
    """None: nothing was measured, and no step time is estimated."""
