"""Settings of a cluster: GPUs, hosts, Slurm, Kubernetes and Ray."""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.contract.codec import OMIT_DEFAULT
from bench.errors import ConfigError


class GpuRequest(Enum):
    """How jobs request GPUs from this site's Slurm."""

    gpus_per_node = "gpus_per_node"
    gres = "gres"
    gres_typed = "gres_typed"
    none = "none"


@dataclass(slots=True, kw_only=True)
class Slurm:
    """Settings of the site, which are written to the script, and of the user, which are passed as sbatch arguments."""

    partition: str | None = None
    gpu_request: GpuRequest = GpuRequest.gpus_per_node
    gpu_type: str | None = None
    """As shown by `scontrol show node` (Gres=gpu:h100:8); for gpu_request=gres_typed."""
    exclusive: bool = True
    """Whole nodes, with all of their memory."""
    cpus_per_rank: int | None = None
    max_walltime_min: int | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    arguments: list[str] = field(default_factory=list)
    """Further arguments of sbatch, such as --exclude=dgx-7 or --time=20."""
    mpi: str = field(default="none", metadata=OMIT_DEFAULT)
    """Value of `srun --mpi` for all commands, such as pmix for a program that starts MPI itself. Never run with MPI."""
    vboost: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Value of `nvidia-smi boost-slider --vboost`, set on every node before the first command; None: not set. The nodes
    keep it after the job. Never run on a GPU."""


class RayCode(Enum):
    """How the nodes get this package.

    uploaded: the submitting machine sends it with the job (py_modules), so all nodes have the same version.
    installed: it is part of the nodes' image or environment.
    """

    uploaded = "uploaded"
    installed = "installed"


class RaySubmission(Enum):
    """KubeRay's submissionMode: how a RayJob's entrypoint is submitted to its Ray cluster."""

    sidecar = "SidecarMode"
    k8s_job = "K8sJobMode"
    http = "HTTPMode"


class RayObject(Enum):
    """What a manifest creates: a RayJob with its own cluster, or a persistent RayCluster for later runs."""

    rayjob = "rayjob"
    raycluster = "raycluster"


@dataclass(slots=True, kw_only=True)
class KubeRay:
    """The Ray cluster that KubeRay creates from a manifest; cluster.kubernetes configures its pods."""

    object: RayObject = RayObject.rayjob
    submission: RaySubmission = RaySubmission.sidecar
    head_works: bool = False
    """True: the head pod is one of the run's nodes. False: it has no GPU, and all nodes are worker pods."""
    head_resources: dict[str, str] = field(default_factory=lambda: {"cpu": "4", "memory": "16Gi"})
    """Resources of the head pod if head_works is false."""
    keep_s: int = 60
    """How long a run's cluster and its objects are kept after the run (ttlSecondsAfterFinished)."""


@dataclass(slots=True, kw_only=True)
class Ray:
    """An existing Ray cluster, given by its address, or one that KubeRay creates."""

    address: str | None = None
    """Address of the dashboard, which accepts jobs: http://HEAD:8265."""
    cpus_per_node: int = 1
    """CPUs reserved per node. GPUs are reserved by cluster.ranks_per_node."""
    resources: dict[str, float] = field(default_factory=dict)
    """Further resources that each node must have, such as accelerator_type:H100: 0.001."""
    environment: list[str] = field(default_factory=list)
    """Names of variables passed from the submitting process to the job. The dashboard shows their values."""
    code: RayCode = RayCode.uploaded
    placement_timeout_min: int = 30
    """How long a job waits until all of its nodes are available."""
    version: str = "2.60.0"
    """Ray version of KubeRay's pods; an existing cluster reports its own."""
    kuberay: KubeRay | None = None


class ObjectKind(Enum):
    """The kind of object that creates the pods; all but `job` need their operator in the cluster."""

    job = "job"
    """batch/v1: an Indexed Job, or one Job per node if the API server is older than Kubernetes 1.24."""
    jobset = "jobset"
    """jobset.x-k8s.io/v1alpha2."""
    pytorchjob = "pytorchjob"
    """kubeflow.org/v1, of Kubeflow's training operator."""
    trainjob = "trainjob"
    """trainer.kubeflow.org/v1alpha1, of Kubeflow Trainer, with a TrainingRuntime for each run."""


class Discovery(Enum):
    """How pods find the first pod.

    service: by its DNS name, from a headless Service.
    file: by the address that it writes to the run folder, for clusters without DNS.
    """

    service = "service"
    file = "file"


@dataclass(slots=True, kw_only=True)
class Volume:
    """A volume of the pods: either a PersistentVolumeClaim, or a folder that exists on every node."""

    claim: str | None = None
    host_path: str | None = None
    sub_path: str | None = None
    """A subfolder of the claim."""


@dataclass(slots=True, kw_only=True)
class Toleration:
    """A node taint that pods tolerate; without a value, all taints with this key."""

    taint: str
    """The taint's key."""
    value: str | None = None
    effect: str | None = None


@dataclass(slots=True, kw_only=True)
class Kubernetes:
    """Settings of the cluster, which are written to the manifest; `context` is for the client only."""

    context: str | None = None
    """Context of the kubeconfig; None: the current context."""
    namespace: str = "default"
    version: str = "1.31"
    """Minimum version of the API server: the manifest uses no newer fields."""
    object: ObjectKind = ObjectKind.job
    image: str | None = None
    """With a digest (name@sha256:…), so that the image cannot change."""
    image_pull_secrets: list[str] = field(default_factory=list)
    """Names of Secrets with the registry's credentials."""
    env_from_secrets: list[str] = field(default_factory=list)
    """Names of Secrets whose keys become environment variables of the ranks, such as HF_TOKEN."""
    gpu_resource: str | None = "nvidia.com/gpu"
    """Resource name of a GPU; amd.com/gpu for AMD."""
    resources: dict[str, str] = field(default_factory=dict)
    """Further resources of each pod, such as cpu, memory, or RDMA devices (rdma/rdma_shared_device_a)."""
    capabilities: list[str] = field(default_factory=list)
    """Linux capabilities added to the container; RDMA needs IPC_LOCK."""
    networks: list[str] = field(default_factory=list)
    """Additional networks (Multus): names of NetworkAttachmentDefinitions."""
    node_selector: dict[str, str] = field(default_factory=dict)
    exclude_nodes: list[str] = field(default_factory=list)
    tolerations: list[Toleration] = field(default_factory=list)
    priority_class: str | None = None
    queue: str | None = None
    """The Kueue LocalQueue that admits the run."""
    workload_priority_class: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """Kueue's priority of the run in its queue, independent of the pods' `priority_class`."""
    service_account: str | None = None
    run_as_user: int | None = 1000
    """None: the image's user, or the one that the cluster assigns; never root."""
    run_as_group: int | None = None
    """None: the same id as the user."""
    labels: dict[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """Further labels of the run's objects and of its pods."""
    annotations: dict[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """Further annotations of the pods, such as Kueue's kueue.x-k8s.io/podset-required-topology."""
    pod: dict[str, Any] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """Further fields of the pods' spec by Kubernetes' own names, such as runtimeClassName, schedulerName, affinity,
    topologySpreadConstraints, volumes, initContainers and resourceClaims. Lists are appended."""
    container: dict[str, Any] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """Further fields of the container by Kubernetes' own names, such as volumeMounts and resources.claims."""
    shm_gib: int = 64
    """Size of /dev/shm, which NCCL and data loaders use; it counts as memory of the pod."""
    data: Volume | None = None
    """Mounted at cluster.paths.data; read-only, unless the run prepares its rows."""
    model: Volume | None = None
    """Mounted at cluster.paths.model; read-only, unless the run trains its base checkpoint."""
    results: Volume | None = None
    """Mounted at cluster.paths.logs; all pods of a run write there."""
    host_network: bool = False
    """Use the network of the node, with its RDMA devices and without the cluster's DNS policy."""
    discovery: Discovery = Discovery.service
    port: int = 29400
    """Port on which the first pod listens for the others."""
    grace_s: int = 60
    """Time for a pod to write its final status after SIGTERM (terminationGracePeriodSeconds)."""
    keep_h: int = 168
    """Hours for which the cluster keeps the objects of a finished run (ttlSecondsAfterFinished)."""


_HOST = re.compile(r"(?P<name>(?:[\w.-]+@)?\w[\w.-]*)(?::(?P<groups>[1-9]\d{0,3})x(?P<size>[1-9]\d{0,3}))?", re.ASCII)


@dataclass(slots=True, kw_only=True)
class Ssh:
    """How the system's ssh reaches the hosts."""

    python: str | None = None
    """The Python interpreter with this package on every host; None: the same path as on this machine."""
    options: list[str] = field(default_factory=list)
    """Further arguments of ssh, such as -F FILE."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host, with its number of groups and GPUs per group, if given."""

    name: str
    groups: int | None = None
    group_size: int | None = None

    @property
    def num_ranks(self) -> int | None:
        """One rank per GPU; None if cluster.ranks_per_node decides."""
        return self.groups * self.group_size if self.groups and self.group_size else None


def parsed(text: str) -> Host:
    """Parse a host: rig0, me@rig0.site, or rig0:2x4 for two groups of four GPUs.

    Raises:
        ConfigError: the text is not a host.
    """
    match = _HOST.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a valid host",
            where="cluster.hosts",
            fix="use NAME, USER@NAME, or NAME:GROUPSxGPUS; rig0:2x4 means two groups of four GPUs on rig0",
        )
    groups, size = match["groups"], match["size"]
    return Host(match["name"], int(groups) if groups else None, int(size) if size else None)


def require_distinct(hosts: list[str]) -> list[Host]:
    """Return the hosts; raise ConfigError for a text that is no host, and for a host that is listed twice."""
    every = [parsed(text) for text in hosts]
    names = [host.name for host in every]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"the list of hosts contains a host more than once: {', '.join(names)}",
            where="cluster.hosts",
            fix="list each host only once",
        )
    return every


def require_even(hosts: list[str], *, num_nodes: int, ranks_per_node: int) -> None:
    """Raise ConfigError unless there is one distinct host per node, each with ranks_per_node GPUs."""
    every = require_distinct(hosts)
    if len(every) != num_nodes:
        raise ConfigError(
            f"cluster.hosts lists {len(every)} hosts, but cluster.num_nodes is {num_nodes}",
            where="cluster.hosts",
            fix=f"set cluster.num_nodes={len(every)}, or list {num_nodes} hosts",
        )
    for host in every:
        if host.num_ranks is not None and host.num_ranks != ranks_per_node:
            counts = {other.num_ranks for other in every}
            raise ConfigError(
                f"host {host.name} has {host.num_ranks} GPUs (groups x GPUs: {host.groups}x{host.group_size}), but "
                f"cluster.ranks_per_node is {ranks_per_node}",
                where="cluster.hosts",
                fix=f"set cluster.ranks_per_node={host.num_ranks}"
                if len(counts) == 1
                else "give every host the same number of GPUs",
            )


@dataclass(slots=True, kw_only=True)
class Rates:
    """Measured rates of an accelerator, to estimate the step time. Sizes ascend; rates between them are interpolated.

    A rate measured inside a step, with a hot GPU and cold caches, is better than that of a kernel alone; `source` gives
    the kind.
    """

    source: str
    layer_tflop: list[float]
    """TFLOP of all GEMMs of one layer in a forward pass; bf16_tflops and fp8_tflops are the rates at these sizes."""
    bf16_tflops: list[float]
    fp8_tflops: list[float]
    attention_forward_tflops: float
    attention_backward_tflops: float
    """The two attention rates are for causal attention in BF16 with rows of 8192 tokens. Masked scores do not count as
    work."""
    copy_gbs: float
    """The rate of copies in GPU memory. It counts the bytes read plus the bytes written."""
    busbw_mib: list[float]
    busbw_gbs: list[float]
    """The all-reduce bus bandwidth in one node for each message size in `busbw_mib`. Empty if not measured, as on one
    GPU."""
    launch_us: float
    """The host time to launch one kernel of an FP8 layer, including the time of Python. Kernels may run faster than the
    host launches them."""
    host_gbs: float | None = None
    """The rate between host memory and GPU memory in one direction. Transfers in the two directions overlap. None if
    not measured."""
    fp8_weight_gradient_tflops: float | None = None
    """The rate of GEMMs that add FP8 weight gradients to FP32 gradients. If it is None, `fp8_tflops` is used."""
    attention_forward_4096_tflops: float | None = None
    attention_backward_4096_tflops: float | None = None
    """The two rates at 4096 tokens are for rows of 4096 tokens. For shorter rows, the rates are extrapolated. If they
    are None, the rates at 8192 tokens are used."""
    elementwise_gbs: float | None = None
    """The rate of GPU memory in the element-wise kernels of a step. If it is None, `copy_gbs` is used."""
    narrow_heads_forward: float | None = field(default=None, metadata=OMIT_DEFAULT)
    narrow_heads_backward: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """The rate of attention with a head size of 64, as a share of the rate with a head size of 128. None if the rates
    are equal."""

    @property
    def kernel_gbs(self) -> float:
        """Device memory in the element-wise kernels of a step, as far as it was measured."""
        return self.elementwise_gbs or self.copy_gbs


class GpuVendor(Enum):
    """The maker of a GPU. torch calls AMD's GPUs CUDA devices, too: device is cuda for both."""

    nvidia = "nvidia"
    amd = "amd"


FIRST_WITH_FP8 = (8, 9)
"""The first compute capability with FP8 tensor cores. Source: CUDA C++ Programming Guide, compute capabilities."""


@dataclass(slots=True, kw_only=True)
class Gpu:
    """One accelerator. All peak rates are dense rates, without sparsity."""

    name: str
    vendor: GpuVendor = field(default=GpuVendor.nvidia, metadata=OMIT_DEFAULT)
    """The vendor determines the telemetry, the image, the devices of containers, and the resource name of pods."""
    memory_gib: float
    peak_bf16_tflops: float | None
    """None if unknown, for example because runstop has no file for the GPU."""
    peak_fp8_tflops: float | None = None
    """None if unknown, or if the GPU does not support FP8."""
    compute_capability: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """For example, 8.9. Only set for a GPU that NVML found."""
    memory_gbs: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """The peak bandwidth of the GPU's memory by the data sheet, in 1e9 bytes/s."""
    link_gbs: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """The peak bandwidth to the other GPUs of a host (NVLink or Infinity Fabric) by the data sheet, in 1e9 bytes/s. It
    is the sum of the two directions. None if not stated, or if the GPU has only PCIe."""
    pcie_gbs: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """The peak bandwidth of PCIe by the data sheet, in 1e9 bytes/s. It is the sum of the two directions."""
    source: str
    rates: Rates | None = None
    """None if not measured. Then runstop estimates no step time."""

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU multiplies matrices in FP8: it has a peak rate, or a compute capability of at least 8.9."""
        capability = self.compute_capability
        return self.peak_fp8_tflops is not None or (
            capability is not None and tuple(map(int, capability.split("."))) >= FIRST_WITH_FP8
        )

    @property
    def why_no_fp8(self) -> str:
        """What a message says about a GPU without FP8. Some of AMD's GPUs have FP8 in other formats than runstop."""
        if self.vendor is GpuVendor.amd:
            return f"runstop's FP8 format is E4M3FN, and {self.name} has no peak rate in this format"
        return f"{self.name} does not support FP8"

    @property
    def has_run(self) -> bool:
        """Whether runstop has trained on a GPU of this vendor."""
        return self.vendor is GpuVendor.nvidia
