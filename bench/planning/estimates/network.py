"""Estimate the time of the collectives of a step from measured bus bandwidths and the links between GPUs."""

import math
from dataclasses import dataclass

from bench.contract.plan import World
from bench.contract.schema import Config, Rates
from bench.planning.estimates import transports
from bench.planning.estimates.transports import Link
from bench.planning.parallelism import tokens


def rate_at(size: float, sizes: list[float], rates: list[float]) -> float:
    """Return the rate at a size, interpolated linearly on two logarithmic axes.

    Below the smallest size the first segment is extrapolated; above the largest size the last rate is used.
    """
    if size >= sizes[-1] or len(sizes) == 1:
        return rates[-1]
    right = next((i for i in range(1, len(sizes)) if size <= sizes[i]), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    share = math.log(size / low) / math.log(high / low)
    return rates[right - 1] * math.exp(share * math.log(rates[right] / rates[right - 1]))


MIB = 2**20


def ring_latency_s(num_ranks: int, num_nodes: int, *, within_s: float, between_s: float) -> float:
    """Return the latency of an all-gather or reduce-scatter: one step of a ring for each rank but the first.

    Source: NCCL, src/graph/tuning.cc.
    """
    between = num_nodes - 1
    return between * between_s + (num_ranks - 1 - between) * within_s


def hidden_bytes(config: Config, world: World, size: int) -> float:
    """Return the bytes of a micro-batch's hidden states on one rank, at `size` bytes per element."""
    return size * config.model.hidden_size * tokens(config, world)


def collectives(config: Config, world: World, rates: Rates) -> "Collectives | None":
    """Return the collectives of a layout; None if the bandwidth of a link that they need is not known."""
    within, between = transports.within_node(config, rates), transports.between_nodes(config)
    if world.num_ranks > 1 and not rates.busbw_gbs:
        return None
    if (within is None and world.ranks_per_node > 1) or (between is None and world.num_nodes > 1):
        return None
    return Collectives(config, world, rates, within or Link(transport=None), between or Link(transport=None))


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives of a layout, on GPUs with these rates."""

    config: Config
    world: World
    rates: Rates
    within_node: Link
    between_nodes: Link

    def around_linears_s(self, gathered: int) -> float:
        """Return the seconds of the collectives around one pair of linears.

        Under sp these are an all-gather of the inputs and a reduce-scatter of the outputs, otherwise one all-reduce.
        """
        return self.gather_s(gathered if self.world.sp else 2) + self.gather_s(2)

    def gather_s(self, size: int) -> float:
        """Return the seconds in which the ranks of tp all-gather hidden states of `size` bytes per element."""
        return self.exchange_s(hidden_bytes(self.config, self.world, size), ranks=self.world.tp, stride=1)

    def keys_and_values_s(self) -> float:
        """Return the seconds in which the ranks of cp all-gather keys and values, or reduce-scatter their gradients."""
        size = 2 * 2 * self.config.model.kv_size / self.world.tp * tokens(self.config, self.world) * self.world.cp
        return self.exchange_s(size, ranks=self.world.cp, stride=self.world.tp)

    def exchange_s(self, size: float, *, ranks: int, stride: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of a tensor of `size` bytes; an all-reduce is both."""
        return self.transfer_s(size, ranks=ranks, stride=stride) + self.latency_s(ranks=ranks, stride=stride)

    def transfer_s(self, size: float, *, ranks: int, stride: int) -> float:
        """Return the seconds of an exchange without the latency of its links."""
        return (ranks - 1) / ranks * size / self.bandwidth(size, ranks=ranks, stride=stride) if ranks > 1 else 0.0

    def latency_s(self, *, ranks: int, stride: int) -> float:
        """Return the latency of an exchange."""
        num_nodes = -(-ranks // self._in_node(stride))
        return ring_latency_s(
            ranks, num_nodes, within_s=self.within_node.latency_s, between_s=self.between_nodes.latency_s
        )

    def send_s(self, size: float, *, ranks: int, stride: int) -> float:
        """Return the seconds in which a rank sends `size` bytes to the next one of its group."""
        link = self.between_nodes if ranks > self._in_node(stride) else self.within_node
        return size / self.bandwidth(size, ranks=ranks, stride=stride) + link.latency_s

    def bandwidth(self, size: float, *, ranks: int, stride: int) -> float:
        """Return the bus bandwidth, in bytes/s, of a group whose rank numbers differ by `stride`.

        Rank numbers run over tp first, then cp, dp and pp. A group that spans nodes has the total bandwidth of the
        network cards of its ranks on one node, one card per rank.
        """
        bandwidth_gbs, in_node = rate_at(size / MIB, self.rates.busbw_mib, self.rates.busbw_gbs), self._in_node(stride)
        if in_node > 1:
            bandwidth_gbs = min(bandwidth_gbs, self.within_node.gbs)
        if ranks > in_node:
            bandwidth_gbs = min(bandwidth_gbs, self.between_nodes.gbs * in_node)
        return bandwidth_gbs * 1e9

    def _in_node(self, stride: int) -> int:
        """Return how many ranks of a group a node, or the NVLink domain of several nodes, has at most."""
        network = self.config.cluster.network
        return max(1, (network and network.nvlink_gpus or self.world.ranks_per_node) // stride)
