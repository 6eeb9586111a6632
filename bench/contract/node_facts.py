"""Facts of nodes (facts/rank_*.json) and their measured health (health.json): written by jobs, read by bench."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Software:
    """What a rank runs in."""

    image: str | None
    in_enroot: bool
    system: str | None
    python: str
    packages: dict[str, str]


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface."""

    name: str
    state: str | None


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an InfiniBand or RoCE adapter, as mlx5_0:1."""

    port: str
    state: str | None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU, as nvidia-smi has it; None where it does not say."""

    index: int | None
    name: str | None
    driver: str | None
    memory_mib: int | None
    ecc_uncorrected: int | None
    rows_pending: str | None
    rows_failed: str | None
    throttle: str | None


@dataclass(frozen=True, slots=True)
class Results:
    """The run folder, seen from a node."""

    path: str
    free_mib: int
    refused: str | None


@dataclass(frozen=True, slots=True)
class Reached:
    """A path that the run needs, or that is made in it."""

    what: str
    path: str | None
    required: bool
    exists: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """What a node is."""

    interfaces: tuple[Interface, ...]
    infiniband: tuple[Port, ...]
    infiniband_devices: bool
    gpus: tuple[GpuFacts, ...] | None
    gpus_refused: str | None
    results: Results
    paths: tuple[Reached, ...]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank found; `machine` on local rank 0 only."""

    rank: int
    local_rank: int
    world_size: int
    node: str
    attempt: str | None
    time_ms: int
    software: Software
    cuda_visible_devices: str | None
    memlock_bytes: int
    not_as_planned: tuple[str, ...]
    machine: Machine | None


@dataclass(frozen=True, slots=True)
class HealthNode:
    """A node's part in the measurements; clock_ms are bounds of how far its clock is ahead of rank 0's."""

    node: str
    clock_ms: tuple[float, float]


@dataclass(frozen=True, slots=True)
class HealthFinding:
    """A rate below its floor."""

    rule: str
    what: str
    where: str
    fix: str


@dataclass(frozen=True, slots=True)
class Health:
    """What was measured, as far as it is judged here."""

    attempt: str | None
    nodes: tuple[HealthNode, ...]
    findings: tuple[HealthFinding, ...]
    slow_nodes: tuple[str, ...]
