"""The links between the GPUs of a cluster, for predictions of the step time."""

from dataclasses import dataclass
from enum import Enum


class Transport(Enum):
    """How data gets from node to node: by RDMA (InfiniBand, RoCE), or by TCP through host memory."""

    rdma = "rdma"
    tcp = "tcp"


@dataclass(slots=True, kw_only=True)
class Network:
    """NVLink and the network between nodes. Rates are in 1e9 bytes/s, one way."""

    source: str
    nvlink_gbs: float
    """What a collective reaches per GPU: a measured bus bandwidth, not the data sheet's peak."""
    nvlink_gpus: int | None = None
    """GPUs of one NVLink domain, such as 72; None: those of a node."""
    nvlink_latency_us: float = 3.4
    """Of one step of a ring. Source: NCCL, src/graph/tuning.cc, NVLink, protocol Simple."""
    nvlink_multicast: bool = False
    """The NVLink switches add and copy data (NVLS)."""
    nics_per_node: int
    nic_gbs: float
    """Of one network card."""
    nic_latency_us: float = 14.0
    """Of one step of a ring. Source: NCCL, src/graph/tuning.cc, network, protocol Simple."""
    rail_optimized: bool = True
    """GPUs with the same number in their nodes are connected to the same switch."""
    oversubscription: float = 1.0
    """Bandwidth of all cards divided by that of the links above the first switch."""
    transport: Transport = Transport.rdma
    in_network_reduction: bool = False
    """The switches between nodes add data (SHARP)."""

    def gbs_of_gpu(self, gpus_per_node: int) -> float:
        """Return one GPU's share of the network cards of its node, if all GPUs send through the whole network."""
        return self.nics_per_node * self.nic_gbs / gpus_per_node / self.oversubscription
