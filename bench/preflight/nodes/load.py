"""Read facts/rank_*.json and health.json of a run folder, by the types of `bench.contract.node_facts`."""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bench.contract import node_facts, regular_files, run_files
from bench.contract.node_facts import Health, Machine, RankFacts
from bench.errors import LogError

T = TypeVar("T")
MOST_NAMES = 8
"""The number of nodes that one message names."""
_DAMAGED = (OSError, ValueError, TypeError, KeyError, AttributeError)
"""What `node_facts.loads` and reading raise for a file that cannot be read."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of all ranks, sorted by rank, and health.json if there is one."""

    folder: str
    ranks: tuple[RankFacts, ...]
    health: Health | None
    read_ms: int
    """The time of reading by the clock of this host."""

    @property
    def machines(self) -> dict[str, Machine]:
        """The hardware of each node."""
        return {rank.node: rank.machine for rank in self.ranks if rank.machine is not None}


def load(folder: Path, *, array_task: str = "") -> Facts:
    """Return the facts of a run folder; for a requeued job only those of its last attempt.

    array_task: the suffix of the job array task, such as _3.

    Raises:
        LogError: a file is damaged.
    """
    paths = sorted((folder / run_files.facts(array_task)).glob("rank_*.json"))
    everyone = sorted((_read(path, RankFacts) for path in paths), key=lambda rank: rank.rank)
    last = max(everyone, key=lambda rank: rank.time_ms).attempt if everyone else None
    path = folder / run_files.health(array_task)
    health = _read(path, Health) if path.exists() else None
    if health is not None and everyone and _start(health.attempt) != _start(last):
        health = None
    return Facts(
        str(folder / run_files.facts(array_task)),
        tuple(rank for rank in everyone if rank.attempt == last),
        health,
        read_ms=time.time_ns() // 1_000_000,
    )


def check_result(path: Path) -> Health | None:
    """Return the result of a node check; None if it cannot be read."""
    with suppress(*_DAMAGED):
        return node_facts.loads(regular_files.read_text(path), Health)
    return None


def listed(nodes: Iterable[str]) -> str:
    """Return the first MOST_NAMES distinct names of nodes, and the number of the others."""
    names = list(dict.fromkeys(nodes))
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def grouped(values: Iterable[tuple[T, str]]) -> dict[T, list[str]]:
    """Return the nodes that share each value, the value of most nodes first."""
    groups: dict[T, list[str]] = {}
    for value, node in values:
        groups.setdefault(value, []).append(node)
    return dict(sorted(groups.items(), key=lambda group: -len(group[1])))


def _start(attempt: str | None) -> str | None:
    """Return job id and restart count, which facts and health of the same attempt share."""
    return attempt and attempt.rpartition(".")[0]


def _read(path: Path, kind: type[T]) -> T:
    try:
        return node_facts.loads(path.read_text(), kind)
    except _DAMAGED as error:
        raise LogError(
            f"the record of a node's hardware and software cannot be read: {error}",
            where=str(path),
            fix="start the job again: its nodes write this file",
        ) from error
