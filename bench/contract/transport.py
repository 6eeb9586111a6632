"""How NCCL joins ranks: what a run's environment asks for, and what NCCL's own log says was used.

In cluster.environment ask NCCL_NET=Socket or IB, NCCL_IB_DISABLE=1, NCCL_SOCKET_IFNAME, and for the GPUs of a node
NCCL_P2P_LEVEL=NVL (NVLink), NCCL_P2P_DISABLE=1 (neither NVLink nor peer-to-peer over PCIe) and NCCL_SHM_DISABLE=1 (not
by the host's memory: with both of these, by the network). Ranks and the login node import this module: it needs the
standard library only.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bench.contract import run_files

NET, IB_DISABLE, INTERFACE, P2P_DISABLE = "NCCL_NET", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE"
P2P_LEVEL, SHM_DISABLE = "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"
ASKING = (NET, IB_DISABLE, INTERFACE, P2P_DISABLE, P2P_LEVEL, SHM_DISABLE)
SOCKET, IB = "Socket", "IB"
P2P, SHM = "P2P", "SHM"
NVLINK = "NVL"
"""The level at which GPUs are joined by P2P only where NVLink joins them. Source: NCCL's documentation."""
SWITCHES = {P2P: P2P_DISABLE, SHM: SHM_DISABLE}
"""What switches off a way to join GPUs of a node."""
LOG = f"{run_files.RANK_LOGS}/nccl.%h.%p.log"
"""NCCL's spelling: host and process id. The path is relative to the run folder, in which ranks start."""
LOGGING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM,ENV", "NCCL_DEBUG_FILE": LOG}
"""What makes NCCL write the lines that are read here. Source: NCCL's documentation, "Environment Variables"."""

_JOINED = re.compile(r"Channel \S+ : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via ((?:NET/)?\w+)\S*")
_DEVICES = re.compile(r"NET/(?:IB|Socket) ?: Using (.*)$")
"""Source: NCCL 2.27, src/transport/net.cc, p2p.cc, shm.cc, net_socket.cc and net_ib.cc."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the environment of a run asks of NCCL; None where it leaves the choice to NCCL."""

    net: str | None
    interface: str | None
    without: tuple[str, ...]
    """The ways to join GPUs of a node that are switched off."""
    only_nvlink: bool
    """P2P, and that over NVLink alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What NCCL's log of some ranks says; empty where it says nothing of that kind."""

    nets: tuple[str, ...] = ()
    """How ranks of different nodes are joined: IB, Socket, or the name of a plugin."""
    local: tuple[str, ...] = ()
    """How ranks of one node are joined: P2P, SHM."""
    devices: str = ""
    """The interfaces and adapters that NCCL found."""
    lines: tuple[str, ...] = ()
    """One of the log that says so, for each of them."""


def asked(environment: Mapping[str, str]) -> Asked:
    """Return what is asked of NCCL."""
    net = environment.get(NET)
    if net is None and environment.get(IB_DISABLE) == "1":
        net = SOCKET
    return Asked(
        net=net,
        interface=environment.get(INTERFACE),
        without=tuple(way for way, name in SWITCHES.items() if environment.get(name) == "1"),
        only_nvlink=environment.get(P2P_LEVEL) == NVLINK,
    )


def is_asked(environment: Mapping[str, str]) -> bool:
    """Return whether the environment says anything of how NCCL joins ranks."""
    return any(name in environment for name in ASKING)


def selected(wanted: str, names: Iterable[str]) -> set[str]:
    """Return which names NCCL selects: `wanted` lists prefixes, after = whole names, after ^ those to leave out.

    Source: NCCL's documentation of NCCL_SOCKET_IFNAME and NCCL_IB_HCA.
    """
    others, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    items = [item for item in wanted.lstrip("^=").split(",") if item]

    def is_listed(name: str) -> bool:
        whole = any(item in (name, name.partition(":")[0]) for item in items)
        return whole if exact else any(name.startswith(item) for item in items)

    return {name for name in names if is_listed(name) != others}


def read(text: str) -> Used:
    """Return what NCCL's log says."""
    by_way: dict[str, str] = {}
    devices = ""
    for line in text.splitlines():
        if joined := _JOINED.search(line):
            by_way.setdefault(joined[3], line.strip())
        elif found := _DEVICES.search(line):
            devices = devices or found[1].strip()
    nets = tuple(way.removeprefix("NET/") for way in by_way if way.startswith("NET/"))
    local = tuple(way for way in by_way if not way.startswith("NET/"))
    return Used(nets=nets, local=local, devices=devices, lines=tuple(by_way.values()))


def together(found: Iterable[Used]) -> Used:
    """Return what the logs of all ranks say."""
    every = tuple(found)

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


def _is_kind(net: str, wanted: str) -> bool:
    """Return whether a network is the one that was asked for; a plugin's name (IBext_v8) begins with what it is."""
    return net.lower().startswith(wanted.lower())


def contradiction(wanted: Asked, used: Used) -> str | None:
    """Return in which point NCCL did something else than it was asked; None where its log shows nothing of that."""
    if others := [net for net in used.nets if wanted.net is not None and not _is_kind(net, wanted.net)]:
        return f"{NET} should be {wanted.net}, and NCCL joined nodes by {', '.join(others)}"
    if found := [way for way in wanted.without if way in used.local]:
        return f"{SWITCHES[found[0]]} is 1, and NCCL joined GPUs of a node by {found[0]}"
    if wanted.only_nvlink and (others := [way for way in used.local if way != P2P]):
        return f"{P2P_LEVEL} is {NVLINK}, and NCCL joined GPUs of a node by {', '.join(others)}: NVLink does not"
    return None
