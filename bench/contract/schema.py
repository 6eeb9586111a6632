"""The config schema.

`bench.planning.compose` registers `Config` with Hydra, which checks the types of every file in `conf/` and of every
override. Slots make an unknown key an error.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.contract.cluster import Gpu as Gpu
from bench.contract.cluster import GpuVendor as GpuVendor
from bench.contract.cluster import Kubernetes, Ray, Slurm, Ssh
from bench.contract.cluster import Rates as Rates
from bench.contract.codec import OMIT_DEFAULT
from bench.contract.data import Data as Data
from bench.contract.data import DataSource as DataSource
from bench.contract.engine import HuggingFace as HuggingFace
from bench.contract.engine import Nemo as Nemo
from bench.contract.failures import Failures as Failures
from bench.contract.model import Model
from bench.contract.network import Network as Network
from bench.contract.program import Program as Program
from bench.contract.stall import Stall
from bench.contract.task import Kind, Task
from bench.contract.training import Recipe, Training
from bench.errors import ConfigError

PORTS = range(61000, 65536)
"""Default ports for rendezvous: above Linux' ephemeral ports, so that no other program takes one by chance.

Source: Enroot's PyTorch hook does the same.
"""


class Device(Enum):
    """The device of a rank. auto: the GPUs of this machine if it has any, which the plan replaces by cuda or cpu."""

    cpu = "cpu"
    cuda = "cuda"
    auto = "auto"


class Precision(Enum):
    """Precision of weights and activations; gradients are reduced, and optimizer states stored, in FP32.

    fp8: frozen linears compute in FP8 (E4M3) with one scale per weight, and one per row of activations and gradients;
    adapters, attention, embedding and head are as with bf16.
    """

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"


class EngineName(Enum):
    """The engines: ours on megatron-core, Hugging Face's libraries, NeMo with its own loop, or the user's program."""

    megatron = "megatron"
    huggingface = "huggingface"
    nemo = "nemo"
    command = "command"


class BackendName(Enum):
    """The backends that start the ranks."""

    local = "local"
    ssh = "ssh"
    slurm = "slurm"
    ray = "ray"
    kubernetes = "kubernetes"

    @property
    def has_queue(self) -> bool:
        """Whether a scheduler assigns nodes to queued jobs, which need a time limit."""
        return self not in (BackendName.local, BackendName.ssh)

    @property
    def is_elsewhere(self) -> bool:
        """Whether ranks run on other machines, whose nodes are checked before the first trial."""
        return self is not BackendName.local


class Runtime(Enum):
    """The container runtime of the ranks."""

    none = "none"
    pyxis = "pyxis"
    docker = "docker"
    podman = "podman"
    apptainer = "apptainer"


class ContainerFlags(Enum):
    """How boolean options are passed to Pyxis: as srun flags, or as PYXIS_CONTAINER_* if srun rejects them (PYX-01)."""

    arguments = "arguments"
    environment = "environment"


class ProfileKind(Enum):
    """The profile of warm-up steps on rank 0; timed steps are not profiled.

    kernels: the last step's kernels, by time, in rank_logs/trial_K.profile.
    modules: the time breakdown of two of three more steps, in rank_logs/trial_K.modules.json, and their trace.
    For a server: of decode steps before the timed loads.
    nsys: Nsight Systems records launch.profile_steps of the training on every rank; these are timed steps.
    """

    none = "none"
    kernels = "kernels"
    modules = "modules"
    nsys = "nsys"


class Tracker(Enum):
    """An experiment tracker to which the curves of a log are written."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"
    wandb = "wandb"


@dataclass(slots=True, kw_only=True)
class Engine:
    """The engine, and its settings. Only the block of the chosen engine is set."""

    name: EngineName
    huggingface: HuggingFace | None = field(default=None, metadata=OMIT_DEFAULT)
    nemo: Nemo | None = field(default=None, metadata=OMIT_DEFAULT)
    command: Program | None = field(default=None, metadata=OMIT_DEFAULT)
    preset: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """A folder of conf/preset: the values of a published program, by the GPU and the number of nodes."""


@dataclass(slots=True, kw_only=True)
class Parallel:
    """How one replica of the model is split over ranks; the rest is data parallel. None: the plan chooses."""

    tp: int | None
    pp: int | None
    cp: int | None
    vpp: int = 1
    """Model chunks per pipeline rank (interleaved schedule)."""
    ep: int = field(default=1, metadata=OMIT_DEFAULT)
    """Over how many ranks of a data-parallel group the experts of each layer are split."""
    sp: bool | None = False
    """Sequence parallel: norms and dropout split over the TP ranks along the sequence."""
    distributed_optimizer: bool = True
    overlap: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """The replicas exchange gradients and weights while layers compute. The results are the same without it. None: on
    GPUs."""
    groups: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """Number of local SGD groups, or of replicas that generate, each with its share of the ranks. None: one."""
    share_gpu: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """Generation tasks: allow several replicas on one GPU. None: no."""


@dataclass(slots=True, kw_only=True)
class Health:
    """Minimum rates of a healthy job; if one is missed, the job ends before the first trial. None: not checked."""

    source: str
    min_mib: int = 62
    max_mib: int = 2048
    """All-reduce message sizes, doubled from min to max. Source: NVIDIA's run.sub, all_reduce_perf -b 62M -e 2G."""
    busbw_gbs: float | None = None
    """Bus bandwidth of the best size over all ranks, in 1e9 bytes/s: 2 (n - 1) / n * bytes / seconds."""
    node_busbw_gbs: float | None = None
    """The same within one node."""
    gemm_tflops: float | None = None
    """BF16 GEMM of the slowest rank (FP32 on a CPU)."""
    copy_gbs: float | None = None
    """Device memory, bytes read plus bytes written per second, of the slowest rank."""


@dataclass(slots=True, kw_only=True)
class Paths:
    """Paths on the machine that runs the job; None until the environment variable is set."""

    data: str | None
    model: str | None
    logs: str | None


@dataclass(slots=True, kw_only=True)
class Cluster:
    """The machines of a run, and the backend that uses them."""

    name: str
    summary: str
    org: str
    platform: str
    status: str
    """MLPerf's submission_status: onprem, cloud, preview or research."""
    backend: BackendName
    device: Device
    num_nodes: int
    ranks_per_node: int
    """One rank per GPU, unless parallel.share_gpu; without GPUs, the number of CPU processes."""
    paths: Paths
    gpu: Gpu | None = None
    detected_gpus: str | None = field(default=None, metadata=OMIT_DEFAULT)
    """The GPUs that device=auto found on the planning machine, for people; set by the plan."""
    network_gbs: float | None = None
    """Bandwidth of one GPU to another node, in 1e9 bytes/s, for estimates of the step time."""
    network: Network | None = field(default=None, metadata=OMIT_DEFAULT)
    """The links of the GPUs in more detail than network_gbs, which it replaces in estimates."""
    failures: Failures | None = field(default=None, metadata=OMIT_DEFAULT)
    """How often nodes fail, for `plan --scale`. None: failures are not counted."""
    price_per_gpu_hour: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """The price of one GPU for one hour, from which costs are computed. None: unknown, no cost is shown."""
    currency: str = field(default="USD", metadata=OMIT_DEFAULT)
    """The currency of the price: its ISO 4217 code, such as EUR."""
    system_description: dict[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """Fields of MLPerf's system description that no program can read, such as cooling; `runstop pack` writes them."""
    power_per_gpu_w: float | None = field(default=None, metadata=OMIT_DEFAULT)
    """Measured watts of a node in training divided by its GPUs, for the energy of `plan --scale`. None: that of the
    GPU alone, by its data sheet."""
    slurm: Slurm | None = None
    ray: Ray | None = field(default=None, metadata=OMIT_DEFAULT)
    kubernetes: Kubernetes | None = field(default=None, metadata=OMIT_DEFAULT)
    health: Health | None = None
    hosts: list[str] | None = field(default=None, metadata=OMIT_DEFAULT)
    """For backend ssh, in the order of ranks: rig0, or rig0:2x4 for two groups of four GPUs. A smaller
    cluster.num_nodes on the command line or in an arm uses the first hosts."""
    ssh: Ssh | None = field(default=None, metadata=OMIT_DEFAULT)
    avoid: Any = field(default=None, metadata=OMIT_DEFAULT)
    """Nodes that runs must not use: a list of names, or `auto` for those that the history of runs found bad."""
    avoid_within: str = field(default="7d", metadata=OMIT_DEFAULT)
    """How long a node counts as bad after it was found bad, for avoid=auto: a number and m, h or d."""
    avoided: dict[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)
    """The nodes that the run does not use, each with the reason; set by the plan."""
    spare_nodes: int = field(default=0, metadata=OMIT_DEFAULT)
    """Nodes that a job has beyond num_nodes, to replace slow ones; only with launch.replace_slow."""
    drop_caches: str | None = None
    """Command that clears a node's page cache before each trial; None: not cleared, which the log records."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank, such as NCCL_SOCKET_IFNAME; never secrets."""
    master_port: int | None = None
    """Port on which rank 0 listens. None: a free port of PORTS. On Slurm, None selects one of PORTS: the sum of the job
    id and a random number of each attempt, modulo the number of ports."""

    @property
    def device_name(self) -> str:
        """The name of the GPU that the ranks use, else of the device."""
        return self.gpu.name if self.gpu is not None and self.device is Device.cuda else self.device.name


@dataclass(slots=True, kw_only=True)
class Container:
    """The container image of the ranks. Data, model and results are mounted at the same paths as on the host."""

    name: str
    runtime: Runtime
    image: str | None = None
    """A .sqsh file or a registry reference for Pyxis; for docker and podman an image name; for Apptainer a .sif."""
    mounts: list[str] = field(default_factory=list)
    """Additional mounts, as SRC[:DST[:FLAG+FLAG]]."""
    flags: ContainerFlags = ContainerFlags.arguments
    arguments: list[str] | None = field(default=None, metadata=OMIT_DEFAULT)
    """Further arguments of `docker run`, `podman run` or `apptainer exec`, such as --shm-size=16g."""


@dataclass(slots=True, kw_only=True)
class Launch:
    """How to launch the plan."""

    dry_run: bool = False
    folder: str | None = None
    """The run folder; None: a new one in cluster.paths.logs."""
    wait: bool = False
    """Follow the job until it ends, and return its result."""
    array: bool = False
    """One Slurm array task per trial, so that trials can run at the same time."""
    force: bool = False
    """Start despite preflight errors, which are saved in the run folder."""
    health: bool = True
    """Measure the nodes before the first trial, if cluster.health is set."""
    replace_slow: bool = field(default=False, metadata=OMIT_DEFAULT)
    """Leave out nodes that the node check finds slow: use spare nodes, or requeue the job without them."""
    telemetry: bool = True
    """One process per node samples power, clocks, temperature and memory of its GPUs once a second, for the log."""
    profile: ProfileKind = ProfileKind.none
    profile_steps: list[int] | None = field(default=None, metadata=OMIT_DEFAULT)
    """The first and the last step that nsys records, from 1; only with profile=nsys."""
    attempts: int = 3
    """Maximum number of attempts of a trial after a node failure, a time limit or preemption."""
    stall: Stall | None = field(default_factory=Stall)
    """None: stalls are not detected."""
    trackers: list[Tracker] = field(default_factory=list)
    """Experiment trackers for the curves of each log. The process that follows the run writes them, not the ranks."""


@dataclass(slots=True, kw_only=True)
class Config:
    """All settings of a run."""

    task: Task
    model: Model
    data: Data | None = field(default=None, metadata=OMIT_DEFAULT)
    """The rows of a training task; None for other kinds."""
    recipe: Recipe | None = field(default=None, metadata=OMIT_DEFAULT)
    """The recipe of a training task; None for other kinds."""
    parallel: Parallel
    engine: Engine
    cluster: Cluster
    container: Container
    launch: Launch
    trials: int
    seed_base: int
    precision: Precision
    walltime: int | None
    """Time limit of one trial in minutes; None: no limit. Required by backends with a queue."""

    @property
    def huggingface(self) -> HuggingFace | None:
        """The settings of engine=huggingface; None with another engine."""
        return self.engine.huggingface if self.engine.name is EngineName.huggingface else None

    @property
    def nemo(self) -> Nemo | None:
        """The settings of engine=nemo; None with another engine."""
        return self.engine.nemo if self.engine.name is EngineName.nemo else None

    @property
    def program(self) -> Program | None:
        """The settings of engine=command; None with another engine."""
        return self.engine.command if self.engine.name is EngineName.command else None

    @property
    def training(self) -> Training:
        """The training block of the task.

        Raises:
            ConfigError: the task is of another kind.
        """
        if self.task.training is None:
            raise not_of_kind(self.task, Kind.train)
        return self.task.training

    @property
    def training_data(self) -> Data:
        """The rows of a training task; raises as `training`."""
        if self.data is None:
            raise not_of_kind(self.task, Kind.train)
        return self.data

    @property
    def training_recipe(self) -> Recipe:
        """The recipe of a training task; raises as `training`."""
        if self.recipe is None:
            raise not_of_kind(self.task, Kind.train)
        return self.recipe


def not_of_kind(task: Task, kind: Kind) -> ConfigError:
    """Return the error for a task of the wrong kind."""
    return ConfigError(
        f"task {task.name} is of kind {task.kind.name}, but this command needs a task of kind {kind.name}",
        where="task.kind",
        fix=f"give a task of kind {kind.name}, or a run of such a task",
    )
