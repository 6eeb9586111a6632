"""The links between GPUs, by the transport that cluster.environment requests of NCCL; conf/transport has the rates.

Within a node the measured bus bandwidth of `gpu.Rates` has NVLink or PCIe peer to peer, with its latency. Without peer
to peer, data passes through host memory; without shared memory, too, it passes through the network.
"""

import math
from dataclasses import dataclass
from functools import cache

import yaml

from bench.contract import codec, transport
from bench.contract.network import Transport as NetworkTransport
from bench.contract.schema import Cluster, Config, Rates
from bench.planning.conf_folder import CONF

RDMA, SOCKETS, SHARED_MEMORY = "rdma", "sockets", "shared_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A file of conf/transport."""

    name: str
    summary: str
    source: str
    latency_us: float
    """Of one step of a ring, from one GPU to the next."""
    max_gbs: float = math.inf
    """The largest bandwidth of one GPU on any link."""
    payload_bytes: int = 1
    frame_bytes: int = 1
    """Data of a frame, and all bytes of it on the wire; equal if the rate of the link is a rate of data."""

    @property
    def share(self) -> float:
        """The share of a link's bandwidth that is left to data."""
        return self.payload_bytes / self.frame_bytes

    def reached_gbs(self, gbs: float) -> float:
        """Return the bandwidth of one GPU over a link of this bandwidth."""
        return min(self.max_gbs, self.share * gbs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One GPU's way to the next GPU of a ring."""

    transport: Transport | None
    """None: as in the measurement of the bus bandwidth."""
    gbs: float = math.inf
    """Infinite: the measured bus bandwidth is the only limit."""
    latency_s: float = 0.0
    """In addition to that of the measured bus bandwidth."""


@cache
def load(name: str) -> Transport:
    """Return a transport of conf/transport."""
    return codec.typed(Transport, yaml.safe_load((CONF / "transport" / f"{name}.yaml").read_text()))


def between_nodes(config: Config) -> Link | None:
    """Return the link of one GPU to another node; None if neither cluster.network nor cluster.network_gbs is set.

    Without a request NCCL is expected to use RDMA.
    """
    network_gbs = gbs_between_nodes(config.cluster)
    return None if network_gbs is None else _link(load(_network(config)), network_gbs)


def gbs_between_nodes(cluster: Cluster) -> float | None:
    """Return the bandwidth of one GPU to another node, in 1e9 bytes/s: its share of the cards of its node."""
    if (network := cluster.network) is None:
        return cluster.network_gbs
    return network.gbs_of_gpu(cluster.ranks_per_node)


def within_node(config: Config, rates: Rates) -> Link | None:
    """Return the link between GPUs of a node; None if its bandwidth is not known."""
    disabled = transport.requested(config.cluster.environment).without
    if transport.P2P not in disabled:
        return Link(transport=None)
    if transport.SHM not in disabled:
        return None if rates.host_gbs is None else _link(load(SHARED_MEMORY), rates.host_gbs)
    network = load(_network(config))
    if network.name == SOCKETS:  # through the host's own network, on which no link is a limit
        return _link(network, math.inf)
    return between_nodes(config)


def _link(one: Transport, gbs: float) -> Link:
    return Link(transport=one, gbs=one.reached_gbs(gbs), latency_s=one.latency_us / 1e6)


def _network(config: Config) -> str:
    net, network = transport.requested(config.cluster.environment).net, config.cluster.network
    if net is None and network is not None and network.transport is NetworkTransport.tcp:
        return SOCKETS
    return SOCKETS if net is not None and net.lower().startswith(transport.SOCKET.lower()) else RDMA
