"""The types of facts/rank_*.json (the software and hardware of a rank's node) and health.json (measured rates).

`jobs.node_checks` builds and writes them, and `bench.preflight.nodes` reads them by these types. Ranks import this
module: it needs the standard library only. None means that a value could not be read.
"""

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

from bench.contract import codec

T = TypeVar("T")

VERSION = 1
"""The version of both formats, written to every file."""
HEALTHY, BELOW_FLOOR, NOT_JUDGED = "healthy", "below a floor", "not judged: no floors"
"""The verdicts of health.json."""
NOT_INSTALLED = " is not installed"
"""How `gpus_refused` ends if the image lacks the program or package that reads the GPUs."""


@dataclass(frozen=True, slots=True)
class Software:
    """The software that a rank runs in."""

    image: str | None
    """The content of /etc/runstop-image.json, which only our images have."""
    in_enroot: bool
    system: str | None
    """Name and version of the Linux distribution."""
    python: str
    executable: str
    packages: dict[str, str]
    """Versions by name."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface; the state is up, down or unknown."""

    name: str
    state: str | None
    speed_mbit: int | None
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an InfiniBand or RoCE adapter, named as in NCCL_IB_HCA: mlx5_0:1."""

    port: str
    state: str | None
    physical: str | None
    link: str | None
    rate: str | None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, as nvidia-smi or amdsmi reports it; None where it does not know."""

    index: int | None
    uuid: str | None
    name: str | None
    driver: str | None
    memory_mib: int | None
    temperature_c: int | None
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    ecc_uncorrected: int | None
    rows_pending: str | None = None
    rows_failed: str | None = None
    throttle: str | None = None
    pcie: str | None = None
    """Its fastest link to the host: PCIe gen 5 x16."""


@dataclass(frozen=True, slots=True)
class Disk:
    """One disk of a node; kind: NVMe SSD, SSD or HDD."""

    name: str
    kind: str
    gib: int
    model: str | None


@dataclass(frozen=True, slots=True)
class FileTime:
    """The mtime of a file in the run folder, and the node's clock before and after the write."""

    before_ms: int
    file_ms: int
    after_ms: int


@dataclass(frozen=True, slots=True)
class Results:
    """The run folder as seen from a node; `refused` is the reason why a file cannot be written there."""

    path: str
    free_mib: int
    refused: str | None
    clock: FileTime | None = None
    """None if nothing could be written, and in older facts."""


@dataclass(frozen=True, slots=True)
class NeededPath:
    """A path that the run reads or mounts; if not required, the prepare command may create it."""

    what: str
    path: str | None
    required: bool
    exists: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of a node, and the paths that are accessible from it."""

    cpu: str | None
    num_cpus: int | None
    memory_gib: float
    memory_limit_gib: float | None
    page_bytes: int
    huge_pages: str | None
    shm_mib: int | None
    shm_free_mib: int | None
    architecture: str
    kernel: str
    interfaces: tuple[Interface, ...]
    infiniband: tuple[Port, ...]
    infiniband_devices: bool
    gpus: tuple[GpuFacts, ...] | None
    gpus_refused: str | None
    """The reason why the GPUs are unknown."""
    gpu_links: str | None
    """The table that `nvidia-smi topo -m` prints."""
    results: Results
    paths: tuple[NeededPath, ...]
    num_sockets: int | None = None
    """This and all fields below are None, or empty, in older facts."""
    cores_per_socket: int | None = None
    max_cpu_mhz: int | None = None
    cpu_caches: str | None = None
    """Of the first CPU: L1d 48K, L2 2048K, …"""
    disks: tuple[Disk, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFacts:
    """The facts of one rank; only local rank 0 of a node describes the machine."""

    rank: int
    local_rank: int
    world_size: int
    node: str
    hostname: str
    attempt: str | None
    """Slurm's job id, restart count and step id, joined by dots; None without Slurm."""
    time_ms: int
    software: Software
    cuda_visible_devices: str | None
    num_cpus: int
    memlock_bytes: int
    """The limit of locked memory; -1 is unlimited."""
    environment: tuple[str, ...]
    """Names of environment variables that affect a job, without values."""
    not_as_planned: tuple[str, ...]
    """Names of the plan's variables that have a different value on this rank."""
    machine: Machine | None


@dataclass(frozen=True, slots=True)
class AllReduceRate:
    """The time and the bus bandwidth of one all-reduce of a message of `mib` MiB."""

    mib: int
    ms: float
    busbw_gbs: float


@dataclass(frozen=True, slots=True)
class RankRates:
    """The GEMM and memory copy rates of one rank."""

    rank: int
    local_rank: int
    node: str
    gemm_tflops: float
    copy_gbs: float


@dataclass(frozen=True, slots=True)
class PairRate:
    """The bus bandwidth between two nodes: the sum of their rails."""

    nodes: tuple[str, str]
    mib: int
    busbw_gbs: float


@dataclass(frozen=True, slots=True)
class SlowPart:
    """A part that the search found to be slow; kind: gpu, host, nic, rail or link."""

    kind: str
    nodes: tuple[str, ...]
    """One node, or the two ends of a link; none of a rail."""
    rail: int | None
    """The local rank of the GPU, or of the ranks that use the NIC or rail; None: all of the node."""
    confidence: float


@dataclass(frozen=True, slots=True)
class Search:
    """What the search found after the all-reduce of all nodes was below its floor."""

    rounds: int
    seconds: float
    decided: bool
    """False: something is slow, but the measurements do not show what; `parts` are then only suspects."""
    confidence: float
    parts: tuple[SlowPart, ...]
    """Decided without any: no part is slower than the others, so that it is the shared network."""
    excluded: tuple[str, ...]
    """The nodes whose exclusion leaves out every slow part."""
    others_busbw_gbs: float | None
    """The all-reduce bus bandwidth of all nodes but these; None if it was not measured."""


@dataclass(frozen=True, slots=True)
class HealthNode:
    """A node, its rates, and lower and upper bounds of its clock offset to rank 0."""

    node: str
    ranks: tuple[int, ...]
    allreduce: tuple[AllReduceRate, ...]
    clock_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Floors:
    """The minimum rates of a healthy cluster, from cluster.health; None: not checked."""

    busbw_gbs: float | None
    node_busbw_gbs: float | None
    gemm_tflops: float | None
    copy_gbs: float | None


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A rate below its floor."""

    rule: str
    what: str
    where: str
    fix: str


@dataclass(frozen=True, slots=True)
class Health:
    """Everything that was measured on the nodes, and the verdict on it."""

    time_ms: int
    attempt: str | None
    backend: str
    dtype: str
    device: str
    software: dict[str, str]
    seconds: float
    floors: Floors
    allreduce: tuple[AllReduceRate, ...]
    nodes: tuple[HealthNode, ...]
    ranks: tuple[RankRates, ...]
    pairs: tuple[PairRate, ...]
    verdict: str = NOT_JUDGED
    findings: tuple[HealthFinding, ...] = ()
    slow_nodes: tuple[str, ...] = ()
    """The nodes to exclude from the next job."""
    search: Search | None = None
    """None if the all-reduce of all nodes is not below its floor, and in older files."""


def loads(text: str, kind: type[T]) -> T:
    """Parse the text from `dumps`.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the text is not valid.
    """
    content = dict(json.loads(text))
    del content["version"]
    return codec.typed(kind, content)


def dumps(content: RankFacts | Health) -> str:
    """Return the text of the file.

    Raises:
        ValueError: a number is not finite.
    """
    return json.dumps({"version": VERSION} | asdict(content), indent=1, allow_nan=False) + "\n"
