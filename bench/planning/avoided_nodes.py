"""Leave out nodes by name (cluster.avoid), or those that the history of runs found bad (cluster.avoid=auto)."""

import dataclasses
import re
from collections.abc import Callable, Mapping

from bench.contract import cluster
from bench.contract.schema import BackendName, Cluster, Config
from bench.errors import ConfigError
from bench.texts import counted, nearest, quoted

AUTO = "auto"
BadNodes = Callable[[Cluster], Mapping[str, str]]
"""Returns the bad nodes of a cluster's backend, each with the reason."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,252}")
_TIME = re.compile(r"([0-9]{1,6})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
MAX_NODES = 200
"""More names make the options of a scheduler too long, and are a sign of another problem."""


def seconds(text: str, *, where: str) -> int:
    """Return a time such as 90m, 12h or 7d in seconds.

    Raises:
        ConfigError: the text is no such time, or it is 0.
    """
    match = _TIME.fullmatch(text)
    if match is None or not int(match[1]):
        raise ConfigError(
            f"{quoted(text)} is not a duration above 0",
            where=where,
            fix="write a number and the unit m, h or d, such as 90m, 12h or 7d",
        )
    return int(match[1]) * _SECONDS[match[2]]


def resolved(config: Config, bad_nodes: BadNodes | None) -> Config:
    """Return the config with the nodes to leave out in cluster.avoided, and without them in cluster.hosts.

    Raises:
        ConfigError: cluster.avoid is not valid, or too few hosts are left.
    """
    own = config.cluster
    seconds(own.avoid_within, where="cluster.avoid_within")
    if own.avoid is None:
        return config
    if not own.backend.is_elsewhere:
        raise ConfigError(
            f"cluster.avoid leaves out nodes, but backend {own.backend.name} runs only on this machine",
            where="cluster.avoid",
            fix="remove cluster.avoid, or choose another cluster",
        )
    if own.avoid == AUTO:
        avoided = dict(bad_nodes(own)) if bad_nodes else {}
    else:
        avoided = dict.fromkeys(_names(own.avoid), "listed in cluster.avoid")
    if len(avoided) > MAX_NODES:
        raise ConfigError(
            f"cluster.avoid would leave out {len(avoided)} nodes, but at most {MAX_NODES} nodes are allowed",
            where="cluster.avoid",
            fix="lower cluster.avoid_within, or list fewer nodes in cluster.avoid",
        )
    changed = dataclasses.replace(own, avoided=avoided)
    if own.backend is BackendName.ssh and own.hosts and avoided:
        changed.hosts = [host for host in own.hosts if cluster.parsed(host).name not in avoided]
        if len(changed.hosts) < own.num_nodes:
            raise too_few(len(changed.hosts), own.num_nodes, avoided, where="cluster.hosts")
    return dataclasses.replace(config, cluster=changed)


def too_few(num_left: int, num_nodes: int, avoided: Mapping[str, str], *, where: str) -> ConfigError:
    """Return the error of a run for which too few nodes are left."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(avoided.items())[:4])
    return ConfigError(
        f"without {', '.join(avoided)}, only {counted(num_left, 'node')} can be used, but the run needs "
        f"{counted(num_nodes, 'node')} ({reasons})",
        where=f"cluster.avoid, {where}",
        fix="lower cluster.num_nodes, add nodes, or set cluster.avoid=null; `runstop nodes` shows the problems of each "
        "node",
    )


def _names(avoid: object) -> list[str]:
    """Return the names of a list; raise ConfigError for anything else."""
    if not isinstance(avoid, list):
        hint = f": did you mean {AUTO}?" if nearest(str(avoid), [AUTO]) else ""
        raise ConfigError(
            f"cluster.avoid is {quoted(str(avoid))}, but must be auto or a list of node names{hint}",
            where="cluster.avoid",
            fix="write cluster.avoid=auto, or a list of names such as cluster.avoid=[dgx-7,dgx-9]",
        )
    for name in avoid:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{quoted(str(name))} is not the name of a node",
                where="cluster.avoid",
                fix="write the full name of each node: [dgx-7,dgx-8], not dgx-[7-8]",
            )
    return list(dict.fromkeys(avoid))
