"""AdamW on megatron-core's flat buffers: a step launches a dozen kernels, and the host waits for none of them.

A bucket of a buffer holds the gradients of many weights in one tensor. With the distributed optimizer each rank of DP
(and CP) updates its part of every bucket, otherwise all of it. A rank holds FP32 master weights of what it updates.
"""

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.nn import Parameter

from bench.contract.plan import Plan


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a weight that a shard holds: elements `begin` to `end` of the shard, from element `first` of it."""

    weight: Parameter
    begin: int
    end: int
    first: int


@dataclass(frozen=True, slots=True)
class State:
    """What a rank would lose of a shard if it ended: flat tensors, which the optimizer goes on to use."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True)
class _Shard:
    """The part of a bucket that this rank updates.

    All tensors but `weights` are flat and FP32; those in lists are views of `grad` and `master`.
    """

    grad: Tensor
    master: Tensor
    counted: list[Tensor]
    """The gradients that this rank contributes to the norm, so that each counts once."""
    decayed: list[Tensor]
    """The master weights that decay: those of matrices."""
    weights: list[tuple[Tensor, Tensor]]
    """The weights that the model computes with, each with its master weights."""
    places: list[Place]

    def load(self) -> None:
        for weight, master in self.weights:
            master.copy_(weight)

    def store(self) -> None:
        weights, masters = zip(*self.weights, strict=True)
        torch._foreach_copy_(weights, masters)


class Adam:
    """AdamW of a plan's recipe, with gradients clipped by their norm over all ranks."""

    def __init__(self, plan: Plan, chunks: list[DistributedDataParallel]) -> None:
        self.recipe, self.chunks = plan.config.recipe, chunks
        self.is_sharded = plan.config.parallel.distributed_optimizer
        self.group = None if self.is_sharded else parallel_state.get_model_parallel_group()
        self.shards = [
            _shard(buffer, bucket, self.is_sharded)
            for chunk in chunks
            for buffer in chunk.buffers
            for bucket in buffer.buckets
        ]
        self.reset()

    def reset(self) -> None:
        """Start again from the current weights."""
        for shard in self.shards:
            shard.load()
        r = self.recipe
        masters = [Parameter(shard.master) for shard in self.shards]
        for master, shard in zip(masters, self.shards, strict=True):
            master.grad = shard.grad
        betas = (r.adam_beta1, r.adam_beta2)
        self.adam = torch.optim.AdamW(masters, lr=0.0, betas=betas, eps=r.adam_eps, weight_decay=0.0, fused=True)

    def step(self, lr: float) -> None:
        """Update the weights. The gradients are already summed over the replicas, and are overwritten."""
        norm = self._norm()
        factor = (self.recipe.clip_grad / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([shard.grad for shard in self.shards], factor)
        if decayed := [view for shard in self.shards for view in shard.decayed]:
            torch._foreach_mul_(decayed, 1 - lr * self.recipe.weight_decay)
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        self._store()

    def _store(self) -> None:
        """Give the model its new weights, on all ranks."""
        for shard in self.shards:
            shard.store()
        if self.is_sharded:
            for chunk in self.chunks:
                chunk.start_param_sync()

    @property
    def steps(self) -> int:
        """How many updates the moments have seen."""
        states = [self.adam.state[master] for master in self.adam.param_groups[0]["params"]]
        return max((int(state["step"]) for state in states if state), default=0)

    def state(self, shard: int) -> State:
        """Return the state of a shard, by its number; it may be read and overwritten between two steps."""
        master = self.adam.param_groups[0]["params"][shard]
        state = self.adam.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(master.data), torch.zeros_like(master.data)
        return State(self.shards[shard].master, state["exp_avg"], state["exp_avg_sq"])

    def resume(self, steps: int) -> None:
        """Go on from states that were overwritten, after this number of updates."""
        for shard, master in enumerate(self.adam.param_groups[0]["params"]):
            self.state(shard)
            self.adam.state[master]["step"].fill_(steps)
        self._store()

    def _norm(self) -> Tensor:
        """Return the norm of the gradients of all ranks, each counted once."""
        counted = [view for shard in self.shards for view in shard.counted]
        zero = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
        squares = torch.stack([zero, *torch._foreach_norm(counted)]).square().sum()
        torch.distributed.all_reduce(squares, group=self.group)
        return squares.sqrt()


def _shard(buffer, bucket, is_sharded: bool) -> _Shard:
    """Return this rank's part of a bucket."""
    size, rank = (buffer.data_parallel_world_size, buffer.data_parallel_group.rank()) if is_sharded else (1, 0)
    length = bucket.grad_data.numel() // size
    begin = rank * length
    master = torch.zeros(length, dtype=torch.float32, device=bucket.grad_data.device)
    grad = bucket.grad_data[begin : begin + length]
    first = bucket.offset + begin
    places = sorted(
        (
            (start - first, end - first, param)
            for param, (start, end, n) in buffer.param_index_map.items()
            if n == bucket.bucket_id
        ),
        key=lambda place: place[0],
    )
    held = [place for place in places if place[0] < length and place[1] > 0]
    mine = [(max(start, 0), min(end, length), param) for start, end, param in held]
    if is_sharded:
        weights = [(bucket.param_data[begin : begin + length], master)]
    else:
        weights = [(param.data.view(-1), master[start:end]) for start, end, param in mine]
    counts = [param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param) for _, _, param in mine]
    return _Shard(
        grad=grad,
        master=master,
        counted=[grad[a:b] for a, b in _ranges(mine, counts)],
        decayed=[master[a:b] for a, b in _ranges(mine, [param.dim() > 1 for _, _, param in mine])],
        weights=weights,
        places=[Place(param, a, b, max(0, -start)) for (start, _, param), (a, b, _) in zip(held, mine, strict=True)],
    )


def _ranges(places: list[tuple[int, int, Parameter]], chosen: list[bool]) -> list[tuple[int, int]]:
    """Return the ranges of the chosen weights; neighbours make one range, with the zeros between them."""
    ranges: list[tuple[int, int]] = []
    was_chosen = False
    for (start, end, _), is_chosen in zip(places, chosen, strict=True):
        if is_chosen:
            ranges.append((ranges.pop()[0] if was_chosen else start, end))
        was_chosen = is_chosen
    return ranges
