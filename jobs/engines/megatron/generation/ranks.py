"""The TP ranks of a replica, and their collectives during generation."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.contract.generation import WeightPrecision
from bench.contract.plan_kinds import GenerationPlan

if TYPE_CHECKING:
    from jobs.engines.megatron.generation.peer_memory import PeerMemory


class OneRank:
    """A substitute for a process group of one rank, if no process group exists."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class Ranks:
    """The TP ranks of a replica. Without a group there is only this rank.

    peers: memory for small sums that the ranks share; without it, all collectives use the backend of the group.
    no_peers: why there is none.
    """

    def __init__(
        self, group: ProcessGroup | OneRank | None = None, peers: "PeerMemory | None" = None, no_peers: str = ""
    ) -> None:
        self.group, self.peers, self.no_peers = group or OneRank(), peers, no_peers
        self.size, self.rank = self.group.size(), self.group.rank()

    def facts(self) -> dict[str, object]:
        """Return which all-reduce is used, for the log; nothing without TP."""
        if isinstance(self.group, OneRank) or self.size == 1:
            return {}
        backend = "nccl" if "nccl" in torch.distributed.get_backend(self.group) else "gloo"
        if self.peers is None:
            return {"all_reduce": backend, "no_peer_memory": self.no_peers}
        return {"all_reduce": "peer_memory", "all_reduce_bytes": self.peers.most_bytes, "all_reduce_above": backend}

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in place."""
        if self.peers is not None and self.peers.sums_here(x):
            return self.peers.sum_(x)
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in a new first dimension."""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out.view(self.size, *x.shape)

    def gather_columns(self, x_BV: Tensor) -> Tensor:
        """Return the columns of all ranks, concatenated."""
        return x_BV if self.size == 1 else self.gather(x_BV).movedim(0, 1).flatten(1)


def connect(plan: GenerationPlan, group: ProcessGroup, device: torch.device) -> Ranks:
    """Return the ranks of a group, with peer memory if the plan and the GPUs allow it; all ranks call this together."""
    settings = plan.config.task.generation
    assert settings is not None, "the plan is of kind generate"
    reasons = {
        "the ranks have no GPUs": device.type != "cuda",
        "task.generation.peer_memory is false": not settings.peer_memory,
        "sums are in FP32": plan.weights is WeightPrecision.fp32,
    }
    reason = next((what for what, is_so in reasons.items() if is_so), "")
    if group.size() == 1 or reason:
        return Ranks(group, no_peers=reason)
    from jobs.engines.megatron.generation import peer_memory

    return Ranks(group, *peer_memory.share(group, device))
