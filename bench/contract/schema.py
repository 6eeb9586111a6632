"""The nouns: what a run is made of.

Plain typed dataclasses; `bench.launch` registers `Config` with Hydra, whose types then check every file in `conf/` and
every override. Slots make an unknown key an error instead of a stray attribute.
"""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.cluster import Gpu as Gpu
from bench.contract.cluster import Kubernetes, Ray, Slurm, Ssh
from bench.contract.cluster import Rates as Rates
from bench.contract.codec import OMIT_DEFAULT
from bench.contract.data import Data as Data
from bench.contract.data import DataSource as DataSource
from bench.contract.engine import HuggingFace as HuggingFace
from bench.contract.engine import Nemo as Nemo
from bench.contract.model import Model
from bench.contract.stall import Stall
from bench.contract.task import Kind, Task
from bench.contract.training import Recipe, Training
from bench.errors import ConfigError

PORTS = range(61000, 65536)
"""Where ranks meet unless they are told: above Linux' ephemeral ports, so that no other program takes one by chance.

Source: Enroot's PyTorch hook does the same.
"""


class Device(Enum):
    """What a rank computes on."""

    cpu = "cpu"
    cuda = "cuda"


class Precision(Enum):
    """Weights and activations; gradients are summed, and optimizer states kept, in FP32.

    fp8: frozen linears multiply in FP8 (E4M3), their weights with one scale, activations and gradients with one a row;
    adapters, attention, embedding and head stay as in bf16.
    """

    fp32 = "fp32"
    bf16 = "bf16"
    fp8 = "fp8"


class EngineName(Enum):
    """What trains: ours on megatron-core, Hugging Face's libraries, or NeMo by its own loop."""

    megatron = "megatron"
    huggingface = "huggingface"
    nemo = "nemo"


class BackendName(Enum):
    """Who starts the ranks."""

    local = "local"
    ssh = "ssh"
    slurm = "slurm"
    ray = "ray"
    kubernetes = "kubernetes"

    @property
    def has_queue(self) -> bool:
        """Whether jobs wait for nodes that somebody else hands out; they need a time limit."""
        return self not in (BackendName.local, BackendName.ssh)

    @property
    def is_elsewhere(self) -> bool:
        """Whether ranks run on other machines than this one, whose nodes are looked at before the first trial."""
        return self is not BackendName.local


class Runtime(Enum):
    """What a rank runs in."""

    none = "none"
    pyxis = "pyxis"
    docker = "docker"
    podman = "podman"


class ContainerFlags(Enum):
    """How Pyxis gets boolean options: as flags of srun, or as PYXIS_CONTAINER_* if Slurm aborts on them (PYX-01)."""

    arguments = "arguments"
    environment = "environment"


class ProfileKind(Enum):
    """What rank 0 profiles of the warm-up; no timed step is traced.

    kernels: the last step's kernels, by time, in rank_logs/trial_K.profile.
    modules: where the time of two more steps goes, in rank_logs/trial_K.modules.json, and their trace.
    """

    none = "none"
    kernels = "kernels"
    modules = "modules"


class Tracker(Enum):
    """An experiment tracker that the curves of a log are written for."""

    tensorboard = "tensorboard"
    mlflow = "mlflow"
    wandb = "wandb"


@dataclass(slots=True, kw_only=True)
class Engine:
    """What trains the model."""

    name: EngineName
    huggingface: HuggingFace | None = field(default=None, metadata=OMIT_DEFAULT)
    nemo: Nemo | None = field(default=None, metadata=OMIT_DEFAULT)
    """Settings of the engine of this name, and of no other."""


@dataclass(slots=True, kw_only=True)
class Parallel:
    """How one replica of the model is split over ranks; what is left over is data parallel. None: the plan chooses."""

    tp: int | None
    pp: int | None
    cp: int | None
    vpp: int = 1
    """Model chunks per pipeline rank (interleaved schedule)."""
    sp: bool | None = False
    """Sequence parallel: norms and dropout split over the TP ranks along the sequence."""
    distributed_optimizer: bool = True
    groups: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """How many whole layouts work beside each other, each on its share of the ranks. None: one."""
    share_gpu: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """Of a generation task: several replicas may compute on one GPU. None: no."""


@dataclass(slots=True, kw_only=True)
class Health:
    """Lowest rates of a healthy job; below one of them the job ends before the first trial. None: not checked."""

    source: str
    min_mib: int = 62
    max_mib: int = 2048
    """All-reduce message sizes, doubled from min to max. Source: NVIDIA's run.sub, all_reduce_perf -b 62M -e 2G."""
    busbw_gbs: float | None = None
    """Bus bandwidth of the best size over all ranks, in 1e9 bytes/s: 2 (n - 1) / n * bytes / seconds."""
    node_busbw_gbs: float | None = None
    """The same, among the ranks of one node."""
    gemm_tflops: float | None = None
    """BF16 GEMM of the slowest rank (FP32 on a CPU)."""
    copy_gbs: float | None = None
    """Device memory, bytes read plus bytes written per second, of the slowest rank."""


@dataclass(slots=True, kw_only=True)
class Paths:
    """Where things lie on the machine that runs the job; None until its environment variable is set."""

    data: str | None
    model: str | None
    logs: str | None


@dataclass(slots=True, kw_only=True)
class Cluster:
    """Where a run happens."""

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
    """One rank per GPU, unless parallel.share_gpu; on a machine without GPUs, one per CPU process."""
    paths: Paths
    gpu: Gpu | None = None
    network_gbs: float | None = None
    """What one GPU can send to another node, in 1e9 bytes/s, for estimates of the step time."""
    slurm: Slurm | None = None
    ray: Ray | None = field(default=None, metadata=OMIT_DEFAULT)
    kubernetes: Kubernetes | None = field(default=None, metadata=OMIT_DEFAULT)
    health: Health | None = None
    hosts: list[str] | None = field(default=None, metadata=OMIT_DEFAULT)
    """Of backend ssh, in the order of their ranks: rig0, or rig0:2x4 for two groups of four GPUs."""
    ssh: Ssh | None = field(default=None, metadata=OMIT_DEFAULT)
    drop_caches: str | None = None
    """Command that empties a node's page cache before each trial; None: caches stay, and the log says so."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set for every rank, such as NCCL_SOCKET_IFNAME; never secrets."""
    master_port: int | None = None
    """Where rank 0 listens. None: one of PORTS, a free one here; on Slurm one derived from the job id, so that jobs on
    a shared node differ."""


@dataclass(slots=True, kw_only=True)
class Container:
    """The image that ranks run in. Data, model and results are mounted at the paths they have outside."""

    name: str
    runtime: Runtime
    image: str | None = None
    """A .sqsh file, or a registry reference for Pyxis; for docker and podman what their `run` takes."""
    mounts: list[str] = field(default_factory=list)
    """More than those, as SRC[:DST[:FLAG+FLAG]]."""
    flags: ContainerFlags = ContainerFlags.arguments
    arguments: list[str] | None = field(default=None, metadata=OMIT_DEFAULT)
    """More for `docker run` or `podman run`, such as --shm-size=16g."""


@dataclass(slots=True, kw_only=True)
class Launch:
    """What to do with the plan."""

    dry_run: bool = False
    folder: str | None = None
    """Of this run; None: a new one under cluster.paths.logs."""
    wait: bool = False
    """Follow the Slurm job until it ends, and return what came of it."""
    array: bool = False
    """One Slurm array element per trial, so that trials run at the same time where there is room."""
    force: bool = False
    """Start in spite of what preflight found; the run folder keeps that."""
    health: bool = True
    """Measure the nodes before the first trial, where the cluster says what is healthy."""
    telemetry: bool = True
    """One process a node samples power, clocks, temperature and memory of its GPUs once a second, for the log."""
    profile: ProfileKind = ProfileKind.none
    attempts: int = 3
    """How often one trial may be started, when a node, a time limit or another job ends it."""
    stall: Stall | None = field(default_factory=Stall)
    """None: no rank looks for stalls."""
    trackers: list[Tracker] = field(default_factory=list)
    """Who gets the curves of each log besides, from whoever watches the run; ranks write the log alone."""


@dataclass(slots=True, kw_only=True)
class Config:
    """Everything a user can say about a run."""

    task: Task
    model: Model
    data: Data | None = field(default=None, metadata=OMIT_DEFAULT)
    """The rows of a training task; None for the other kinds, which read none."""
    recipe: Recipe | None = field(default=None, metadata=OMIT_DEFAULT)
    """Of a training task; None for the other kinds, which train nothing."""
    parallel: Parallel
    engine: Engine
    cluster: Cluster
    container: Container
    launch: Launch
    trials: int
    seed_base: int
    precision: Precision
    walltime: int | None
    """Minutes one trial may take; None: no limit on a laptop, and required by Slurm."""

    @property
    def huggingface(self) -> HuggingFace | None:
        """Return the settings of engine=huggingface; None with another engine."""
        return self.engine.huggingface if self.engine.name is EngineName.huggingface else None

    @property
    def nemo(self) -> Nemo | None:
        """Return the settings of engine=nemo; None with another engine."""
        return self.engine.nemo if self.engine.name is EngineName.nemo else None

    @property
    def training(self) -> Training:
        """Return what the task trains.

        Raises:
            ConfigError: it is of another kind, and trains nothing.
        """
        if self.task.training is None:
            raise not_of_kind(self.task, Kind.train)
        return self.task.training

    @property
    def training_data(self) -> Data:
        """Return the rows of a training task; raises as `training`."""
        if self.data is None:
            raise not_of_kind(self.task, Kind.train)
        return self.data

    @property
    def training_recipe(self) -> Recipe:
        """Return the recipe of a training task; raises as `training`."""
        if self.recipe is None:
            raise not_of_kind(self.task, Kind.train)
        return self.recipe


def not_of_kind(task: Task, kind: Kind) -> ConfigError:
    """Return the error of asking a task for what only tasks of another kind have."""
    return ConfigError(
        f"task {task.name} is of kind {task.kind.name}, and this is for tasks of kind {kind.name}",
        where="task.kind",
        fix=f"name a task of kind {kind.name}, or the run of one",
    )
