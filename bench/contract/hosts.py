"""Hosts without a scheduler: their names, and how ssh reaches them. Standard library only."""

import re
from dataclasses import dataclass, field

from bench.errors import ConfigError

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
