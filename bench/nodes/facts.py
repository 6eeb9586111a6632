"""facts/rank_*.json and health.json of a run folder, typed; `jobs.facts` and `jobs.health` say what stands in them."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from bench.errors import LogError

T = TypeVar("T")
MOST_NAMES = 8
"""So many nodes are named in one message."""


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


@dataclass(frozen=True, slots=True)
class Facts:
    """All ranks' facts, by rank, and health.json if there is one."""

    folder: str
    ranks: tuple[RankFacts, ...]
    health: Health | None

    @property
    def machines(self) -> dict[str, Machine]:
        """What each node is."""
        return {rank.node: rank.machine for rank in self.ranks if rank.machine is not None}


def load(folder: Path, *, element: str = "") -> Facts:
    """Return what a run folder holds; of a requeued job only what its last attempt wrote. `element`: _3 in an array's third.

    Raises:
        LogError: a file is damaged.
    """
    paths = sorted((folder / f"facts{element}").glob("rank_*.json"))
    everyone = sorted((_read(path, RankFacts) for path in paths), key=lambda rank: rank.rank)
    last = max(everyone, key=lambda rank: rank.time_ms).attempt if everyone else None
    path = folder / f"health{element}.json"
    health = _read(path, Health) if path.exists() else None
    if health is not None and everyone and _life(health.attempt) != _life(last):
        health = None
    return Facts(str(folder / f"facts{element}"), tuple(rank for rank in everyone if rank.attempt == last), health)


def listed(nodes: Iterable[str]) -> str:
    """Return the names of nodes, once each, the first few of them."""
    names = list(dict.fromkeys(nodes))
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def grouped(values: Iterable[tuple[T, str]]) -> dict[T, list[str]]:
    """Return the nodes that share each value, the value of most nodes first."""
    groups: dict[T, list[str]] = {}
    for value, node in values:
        groups.setdefault(value, []).append(node)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _life(attempt: str | None) -> str | None:
    """Return job and restart count: facts and health are two steps of the same."""
    return attempt and attempt.rpartition(".")[0]


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise LogError(
            f"cannot be read: {error}", where=str(path), fix="start the job again: the file is written anew"
        ) from error
