"""AdamW with the settings of a plan. A step launches few kernels and does not wait for the device."""

from functools import partial
from typing import NamedTuple, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from bench.contract.modules import Part
from bench.contract.plan import Plan
from bench.contract.training import MomentPrecision
from jobs.engines.megatron.adam import update as torch_update
from jobs.engines.megatron.adam.offload import MomentStreamer, Piece, pieces_of
from jobs.engines.megatron.adam.shards import (
    BucketGroup,
    Place,
    Shard,
    bucket_groups,
    buckets_of,
    finish_gather,
    shards_of,
)
from jobs.engines.megatron.adam.update import Moments, Step
from jobs.profiles.ranges import profile_range
from jobs.ranks import rank_times


class State(NamedTuple):
    """This rank's master weights and moments of some weights as flat tensors, and the places of the weights in them."""

    places: list[Place]
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class Adam:
    """AdamW with the settings of a plan; gradients are clipped by their norm over all ranks."""

    num_steps: int
    """Number of updates since the start or the last reset."""

    def __init__(self, plan: Plan, chunks: list[DistributedDataParallel]) -> None:
        self.recipe, self.chunks = plan.config.training_recipe, chunks
        self.is_sharded = plan.config.parallel.distributed_optimizer
        self.group = None if self.is_sharded else parallel_state.get_model_parallel_group()
        self.shards = shards_of(chunks, is_sharded=self.is_sharded)
        dtype = torch.float32 if self.recipe.moments is MomentPrecision.fp32 else torch.bfloat16
        self.pieces = pieces_of(self.shards, dtype, offload=self.recipe.offload_moments)
        self.streamed = MomentStreamer(self.pieces) if self.recipe.offload_moments else None
        self.groups = self._pieces_by_group()
        self.ops = _ops(self.shards[0].grad.device)
        self.reset()

    def reset(self) -> None:
        """Restart from the current weights."""
        self.num_steps = 0
        for shard in self.shards:
            shard.master.copy_(shard.weights)
        for state in self.states():
            state.exp_avg.zero_()
            state.exp_avg_sq.zero_()

    def step(self, lr: float) -> None:
        """Update the weights. The gradients have been reduced over the replicas, and may be overwritten."""
        self.num_steps += 1
        r = self.recipe
        step = Step(self.num_steps, lr, r.adam_beta1, r.adam_beta2, r.adam_eps, r.weight_decay)
        with profile_range(Part.gradient_norm):
            factor = (r.clip_grad / (self._norm() + 1e-6)).clamp(max=1.0)
        update = partial(self.ops.update, factor=factor, step=step)
        with profile_range(Part.adamw):
            for group, pieces in self.groups:
                if self.streamed:
                    self.streamed.update(pieces, update)
                else:
                    for piece in pieces:
                        update(*piece)
                self._start_gather(group)

    def states(self) -> list[State]:
        """Return the optimizer states; callers may read and overwrite them between two steps."""
        if self.streamed:
            torch.cuda.synchronize()  # wait until the moments are back in host memory
        return [State(piece.shard.places, piece.shard.master, *piece.moments) for piece in self.pieces]

    def resume(self, num_steps: int) -> None:
        """Resume after `num_steps` updates, from states that the caller has overwritten."""
        self.num_steps = num_steps
        for group, _ in self.groups:
            finish_gather(group)
        for shard in self.shards:
            shard.weights.copy_(shard.master)
        for group, _ in self.groups:
            self._start_gather(group)

    def _pieces_by_group(self) -> list[tuple[BucketGroup, list[Piece]]]:
        """Return the bucket groups in the order of the forward pass, each with its pieces."""
        number = {bucket: number for number, bucket in enumerate(buckets_of(self.chunks))}
        pieces: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            pieces.setdefault(piece.shard.bucket, []).append(piece)
        groups = bucket_groups(self.chunks)
        return [(group, [piece for bucket in group.buckets for piece in pieces[number[bucket]]]) for group in groups]

    def _start_gather(self, group: BucketGroup) -> None:
        """Gather the weights of a group that other replicas have updated; `data_parallel` says who waits."""
        if self.is_sharded:
            group.start_param_sync()

    def _norm(self) -> Tensor:
        """Return the norm of the gradients of all ranks; each gradient counts once."""
        squares = self.ops.sum_of_squares(self.shards)
        if torch.distributed.get_world_size(self.group) > 1:
            with rank_times.waiting():
                torch.distributed.all_reduce(squares, group=self.group)
        return squares.sqrt()


class _Ops(Protocol):
    """The module `adam.update`, or `adam.kernels`."""

    def sum_of_squares(self, shards: list[Shard]) -> Tensor: ...

    def update(self, shard: Shard, moments: Moments, factor: Tensor, step: Step) -> None: ...


def _ops(device: torch.device) -> _Ops:
    """Return the implementation for the device: Triton kernels or torch."""
    if device.type != "cuda":
        return torch_update
    from jobs.engines.megatron.adam import kernels

    return kernels
