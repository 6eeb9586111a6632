"""NCCL's transport: the one that a run's environment requests, and the one that NCCL's log shows.

cluster.environment can set NCCL_NET=Socket or IB, NCCL_IB_DISABLE=1, NCCL_SOCKET_IFNAME, and for the GPUs of a node
NCCL_P2P_LEVEL=NVL (NVLink), NCCL_P2P_DISABLE=1 (neither NVLink nor peer-to-peer over PCIe) and NCCL_SHM_DISABLE=1 (no
shared memory; with both, GPUs use the network). Standard library only: ranks import it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.contract import run_files

NET, IB_DISABLE, INTERFACE, P2P_DISABLE = "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE"
P2P_LEVEL, SHM_DISABLE = "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"
SETTINGS = (NET, IB_DISABLE, INTERFACE, P2P_DISABLE, P2P_LEVEL, SHM_DISABLE)
SOCKET, IB = "Socket", "IB"
P2P, SHM = "P2P", "SHM"
NVLINK = "NVL"
"""The level at which GPUs use P2P only over NVLink. Source: NCCL's documentation."""
SWITCHES = {P2P: P2P_DISABLE, SHM: SHM_DISABLE}
"""The variables that disable a transport within a node."""
LOG = f"{run_files.RANK_LOGS}/nccl.%h.%p.log"
"""NCCL's spelling: host and process id. The path is relative to the run folder, where ranks start."""
LOGGING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM,ENV", "NCCL_DEBUG_FILE": LOG}
"""Makes NCCL write the lines that this module parses. Source: NCCL's documentation, "Environment Variables"."""

_JOINED = re.compile(r"Channel \S+ : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via ((?:NET/)?\w+)\S*")
_DEVICES = re.compile(r"NET/(?:IB|Socket) ?: Using (.*)$")
"""Source: NCCL 2.27, src/transport/net.cc, p2p.cc, shm.cc, net_socket.cc and net_ib.cc."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """The transport that the environment requests; None: NCCL chooses."""

    net: str | None
    interface: str | None
    without: tuple[str, ...]
    """Transports within a node that are disabled."""
    only_nvlink: bool
    """P2P over NVLink only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The transports in NCCL's log of some ranks; empty if the log shows none."""

    nets: tuple[str, ...] = ()
    """Between nodes: IB, Socket, or the name of a plugin."""
    local: tuple[str, ...] = ()
    """Within a node: P2P, SHM."""
    devices: str = ""
    """The interfaces and adapters that NCCL uses."""
    lines: tuple[str, ...] = ()
    """A line of the log for each of them."""


def requested(environment: Mapping[str, str]) -> Requested:
    """Return the transport that the environment requests."""
    net = environment.get(NET)
    if net is None and environment.get(IB_DISABLE) == "1":
        net = SOCKET
    return Requested(
        net=net,
        interface=environment.get(INTERFACE),
        without=tuple(way for way, name in SWITCHES.items() if environment.get(name) == "1"),
        only_nvlink=environment.get(P2P_LEVEL) == NVLINK,
    )


def has_settings(environment: Mapping[str, str]) -> bool:
    """Return whether the environment sets NCCL's transport."""
    return any(name in environment for name in SETTINGS)


def selected(selector: str, names: Iterable[str]) -> set[str]:
    """Return the names that NCCL selects: `selector` lists prefixes; with = exact names, with ^ names to exclude.

    Source: NCCL's documentation of NCCL_SOCKET_IFNAME and NCCL_IB_HCA.
    """
    others, exact = selector.startswith("^"), selector.lstrip("^").startswith("=")
    items = [item for item in selector.lstrip("^=").split(",") if item]

    def is_listed(name: str) -> bool:
        whole = any(item in (name, name.partition(":")[0]) for item in items)
        return whole if exact else any(name.startswith(item) for item in items)

    return {name for name in names if is_listed(name) != others}


def read(text: str) -> Used:
    """Parse NCCL's log."""
    by_way: dict[str, str] = {}
    devices = ""
    for line in text.splitlines():
        if joined := _JOINED.search(line):
            by_way.setdefault(joined[3], line.strip())
        elif match := _DEVICES.search(line):
            devices = devices or match[1].strip()
    nets = tuple(way.removeprefix("NET/") for way in by_way if way.startswith("NET/"))
    local = tuple(way for way in by_way if not way.startswith("NET/"))
    return Used(nets=nets, local=local, devices=devices, lines=tuple(by_way.values()))


def together(logs: Iterable[Used]) -> Used:
    """Merge the logs of all ranks."""
    every = tuple(logs)

    def distinct(name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(way for one in every for way in getattr(one, name)))

    ways: dict[str, str] = {}
    for one in every:
        ways |= {way: line for way, line in zip((*one.nets, *one.local), one.lines, strict=False) if way not in ways}
    return Used(
        nets=distinct("nets"),
        local=distinct("local"),
        devices=next((one.devices for one in every if one.devices), ""),
        lines=tuple(ways.values()),
    )


def _is_kind(net: str, expected: str) -> bool:
    """Return whether a network is of the expected kind; the name of a plugin (IBext_v8) starts with its kind."""
    return net.lower().startswith(expected.lower())


def contradiction(expected: Requested, used: Used) -> str | None:
    """Return the difference between the requested and the used transport; None if the log shows none."""
    if others := [net for net in used.nets if expected.net is not None and not _is_kind(net, expected.net)]:
        return f"{NET} requests {expected.net}, but NCCL used {', '.join(others)} between nodes"
    if disabled := [way for way in expected.without if way in used.local]:
        return f"{SWITCHES[disabled[0]]} is 1, but NCCL used {disabled[0]} within a node"
    if expected.only_nvlink and (others := [way for way in used.local if way != P2P]):
        return f"{P2P_LEVEL} is {NVLINK}, but NCCL used {', '.join(others)} instead of NVLink within a node"
    return None
