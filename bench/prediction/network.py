"""Seconds of the collectives and sends of a step, by algorithm, from the links of a cluster.

A group of ranks is in one or more NVLink domains. NCCL chooses the fastest of its algorithms by a model of their
latency and bandwidth; so does this module. Sizes are bytes of the whole tensor: what an all-gather leaves on each
rank, and what a reduce-scatter or all-reduce finds there.

Sources: NCCL 2.28, src/graph/tuning.cc (steps and hardware latencies of ring and tree, protocol Simple); Thakur,
Rabenseifner and Gropp, 2005, doi.org/10.1177/1094342005051521 (costs of ring algorithms); Sanders, Speck and Traeff,
2009, doi.org/10.1016/j.parco.2009.09.001 (two binary trees); Graham et al., 2016, doi.org/10.1109/COMHPC.2016.006
(reduction in switches).
"""

import math
from dataclasses import dataclass

from bench.contract.network import Network, Transport
from bench.planning.estimates import transports
from bench.planning.estimates.network import ring_latency_s

TREE_SHARE = 0.92
"""Bandwidth of a tree between nodes, relative to a ring. Source: NCCL, src/graph/tuning.cc, busBw of Tree, Simple."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: how many, and how many of them share an NVLink domain."""

    num_ranks: int
    in_domain: int

    @property
    def num_domains(self) -> int:
        return -(-self.num_ranks // self.in_domain)


@dataclass(frozen=True, slots=True)
class Links:
    """The links of a cluster as seen by one GPU, in bytes/s and seconds."""

    domain: int
    """GPUs that NVLink connects."""
    nvlink: float
    nvlink_latency_s: float
    nic: float
    """To a GPU of another domain, if every GPU sends at the same time."""
    nic_latency_s: float
    has_multicast: bool = False
    """NVLink switches add and copy data (NVLS, NVLink SHARP)."""
    has_reduction: bool = False
    """Switches between nodes add data (SHARP)."""
    smaller_groups: tuple[tuple[int, float], ...] = ()
    """Numbers of GPUs of a domain, and what a collective among them reaches relative to `nvlink`; more reach it all."""

    def nvlink_of(self, in_domain: int) -> float:
        """Return what a collective of so many GPUs of one domain reaches."""
        return self.nvlink * next((share for most, share in self.smaller_groups if in_domain <= most), 1.0)

    def group(self, num_ranks: int, stride: int) -> Group:
        """Return the group of ranks whose numbers differ by `stride`."""
        return Group(num_ranks, max(1, min(num_ranks, self.domain // stride)))


def links(network: Network, gpus_per_node: int, smaller_groups: tuple[tuple[int, float], ...] = ()) -> Links:
    """Return the links of one GPU; `smaller_groups` as in Links."""
    is_tcp = network.transport is Transport.tcp
    nic_gbs, nic_latency_us = network.gbs_of_gpu(gpus_per_node), network.nic_latency_us
    if not network.rail_optimized:  # data first crosses NVLink to the GPU at the right card, so that both are limits
        nic_gbs = min(nic_gbs, network.nvlink_gbs)
    if is_tcp:
        sockets = transports.load(transports.SOCKETS)
        nic_gbs, nic_latency_us = sockets.reached_gbs(nic_gbs), max(nic_latency_us, sockets.latency_us)
    return Links(
        domain=network.nvlink_gpus or gpus_per_node,
        nvlink=network.nvlink_gbs * 1e9,
        nvlink_latency_s=network.nvlink_latency_us / 1e6,
        nic=nic_gbs * 1e9,
        nic_latency_s=nic_latency_us / 1e6,
        has_multicast=network.nvlink_multicast,
        has_reduction=network.in_network_reduction and not is_tcp,
        smaller_groups=smaller_groups,
    )


def all_gather_s(size: float, group: Group, fabric: Links) -> float:
    """Return the seconds of an all-gather to `size` bytes on each rank; a reduce-scatter of `size` takes as long."""
    if group.num_ranks == 1:
        return 0.0
    return min(_ring_s(size, group, fabric), _hierarchical_s(size, group, fabric))


def all_reduce_s(size: float, group: Group, fabric: Links) -> float:
    """Return the seconds of an all-reduce of `size` bytes by the fastest algorithm that the links have."""
    if group.num_ranks == 1:
        return 0.0
    seconds = [2 * all_gather_s(size, group, fabric), _tree_s(size, group, fabric)]
    if fabric.has_multicast and group.num_domains == 1:  # each rank sends its data once and gets the sum once
        seconds.append(size / fabric.nvlink + 2 * fabric.nvlink_latency_s)
    if fabric.has_reduction and group.num_domains > 1:
        within = Group(group.in_domain, group.in_domain)
        seconds.append(
            2 * all_gather_s(size, within, fabric) + size / group.in_domain / fabric.nic + 2 * fabric.nic_latency_s
        )
    return min(seconds)


def all_to_all_s(size: float, group: Group, fabric: Links) -> float:
    """Return the seconds in which every rank sends a part of its `size` bytes to every other rank."""
    inside, outside = group.in_domain - 1, group.num_ranks - group.in_domain
    latency_s = fabric.nvlink_latency_s * (inside > 0) + fabric.nic_latency_s * (outside > 0)
    return (
        max(inside / group.num_ranks * size / fabric.nvlink, outside / group.num_ranks * size / fabric.nic) + latency_s
    )


def send_s(size: float, group: Group, fabric: Links) -> float:
    """Return the seconds in which a rank sends `size` bytes to the next of its group, across domains if any do."""
    if group.num_ranks == 1:
        return 0.0
    if group.num_domains > 1:
        return size / fabric.nic + fabric.nic_latency_s
    return size / fabric.nvlink + fabric.nvlink_latency_s


def _ring_s(size: float, group: Group, fabric: Links) -> float:
    """Return the seconds of one pass around a ring; each domain sends with the NICs of all its ranks in the group."""
    bandwidth = fabric.nvlink_of(group.in_domain) if group.in_domain > 1 else math.inf
    if group.num_domains > 1:
        bandwidth = min(bandwidth, group.in_domain * fabric.nic)
    latency_s = ring_latency_s(
        group.num_ranks, group.num_domains, within_s=fabric.nvlink_latency_s, between_s=fabric.nic_latency_s
    )
    return (group.num_ranks - 1) / group.num_ranks * size / bandwidth + latency_s


def _hierarchical_s(size: float, group: Group, fabric: Links) -> float:
    """Return the seconds of a gather between domains by each rank's NIC, followed by one inside each domain."""
    k, domains = group.in_domain, group.num_domains
    inside_s = (k - 1) / k * size / fabric.nvlink_of(k) + (k - 1) * fabric.nvlink_latency_s
    outside_s = (domains - 1) / domains * size / k / fabric.nic + math.ceil(math.log2(domains)) * fabric.nic_latency_s
    return inside_s + outside_s


def _tree_s(size: float, group: Group, fabric: Links) -> float:
    """Return the seconds of an all-reduce by two trees over the domains, with a chain in each."""
    k, domains = group.in_domain, group.num_domains
    bandwidth = fabric.nvlink_of(k) / 2 if k > 1 else math.inf  # a rank in the middle gets and sends everything twice
    if domains > 1:
        bandwidth = min(bandwidth, TREE_SHARE * k * fabric.nic / 2)
    latency_s = 2 * (math.ceil(math.log2(domains)) * fabric.nic_latency_s + (k - 1) * fabric.nvlink_latency_s)
    return size / bandwidth + latency_s
