"""What a rank updates: its parts of the buckets of megatron-core's buffers.

A bucket holds the gradients of many weights in one tensor. With the distributed optimizer each rank of DP (and CP)
updates its part of every bucket, otherwise all of it. A rank holds FP32 master weights of what it updates.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.nn import Parameter

BLOCK = 2048
"""How many numbers a program of a kernel processes."""
_END = 2**62
"""Lies behind every number."""


class Marks(NamedTuple):
    """Ranges that do not touch, in order.

    A number lies inside if an odd number of bounds (starts and ends of ranges) lie at or before it.
    """

    ranges: list[tuple[int, int]]
    bounds: Tensor
    """All bounds in order, and then some behind every number, so that a program may read `most_in_block` of them."""
    passed: Tensor
    """For each block of BLOCK numbers: how many bounds lie at or before its first number."""
    most_in_block: int
    """The largest number of bounds that one block has besides."""


def marks(ranges: list[tuple[int, int]], length: int, device: torch.device) -> Marks:
    """Return the ranges of a tensor of this length, with their tables on the device."""
    bounds = np.array([bound for pair in ranges for bound in pair], dtype=np.int64)
    first = np.arange(0, length, BLOCK)
    passed = np.searchsorted(bounds, first, side="right")
    in_block = np.searchsorted(bounds, np.minimum(first + BLOCK, length), side="left") - passed
    most = int(in_block.max(initial=0))
    padded = np.append(bounds, [_END] * (most + 1))
    of_bounds, of_passed = (torch.from_numpy(x).to(device) for x in (padded, passed.astype(np.int32)))
    return Marks(ranges, of_bounds, of_passed, most)


class Place(NamedTuple):
    """Where a weight lies in a shard: numbers start to end are those of the flat weight from `offset` on."""

    start: int
    end: int
    weight: Parameter
    offset: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a bucket that this rank updates. Its tensors are flat and equally long; gaps between weights are 0."""

    bucket: int
    """The number of the bucket, the same on all replicas."""
    first: int
    """The index of the shard's first number in the bucket."""
    grad: Tensor
    master: Tensor
    """In FP32, as the gradient is."""
    weights: Tensor
    """What the model computes with."""
    places: list[Place]
    counted: Marks
    """The gradients that this rank contributes to the norm, so that each counts once."""
    decayed: Marks
    """The weights that decay: matrices."""

    def part(self, begin: int, end: int) -> "Shard":
        """Return the numbers from begin to end."""
        end = min(end, len(self.grad))
        grad, master, weights = (x[begin:end] for x in (self.grad, self.master, self.weights))
        return _shard(self.bucket, self.first + begin, grad, master, weights, _cut(self.places, begin, end))


def shards_of(chunks: list[DistributedDataParallel], *, is_sharded: bool) -> list[Shard]:
    """Return this rank's part of every bucket; is_sharded: replicas share the work."""
    found: list[Shard] = []
    for chunk in chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                found.append(_shard_of(len(found), buffer, bucket, is_sharded))
    return found


def _shard_of(number: int, buffer: Any, bucket: Any, is_sharded: bool) -> Shard:
    size, rank = (buffer.data_parallel_world_size, buffer.data_parallel_group.rank()) if is_sharded else (1, 0)
    length = bucket.grad_data.numel() // size
    places = sorted(
        (
            Place(start - bucket.offset, end - bucket.offset, weight, 0)
            for weight, (start, end, n) in buffer.param_index_map.items()
            if n == bucket.bucket_id
        ),
        key=lambda place: place.start,
    )
    first, last = rank * length, (rank + 1) * length
    weights = bucket.param_data[first:last] if is_sharded else _flattened(places, length)
    master = torch.zeros(length, dtype=torch.float32, device=weights.device)
    return _shard(number, first, bucket.grad_data[first:last], master, weights, _cut(places, first, last))


def _flattened(places: list[Place], length: int) -> Tensor:
    """Move the weights of a bucket into one flat tensor, as the distributed optimizer has them, and return it."""
    like = places[0].weight
    flat = torch.zeros(length, dtype=like.dtype, device=like.device)
    for start, end, weight, _ in places:
        flat[start:end].copy_(weight.data.view(-1))
        weight.data = flat[start:end].view(weight.shape)
    return flat


def _shard(bucket: int, first: int, grad: Tensor, master: Tensor, weights: Tensor, places: list[Place]) -> Shard:
    counts = [param_is_not_shared(p.weight) and param_is_not_tensor_parallel_duplicate(p.weight) for p in places]
    decays = [place.weight.dim() > 1 for place in places]
    counted, decayed = (marks(_ranges(places, chosen), len(grad), grad.device) for chosen in (counts, decays))
    return Shard(bucket, first, grad, master, weights, places, counted, decayed)


def _cut(places: list[Place], begin: int, end: int) -> list[Place]:
    """Return the places in what lies between begin and end."""
    return [
        Place(max(start - begin, 0), min(stop, end) - begin, weight, offset + max(begin - start, 0))
        for start, stop, weight, offset in places
        if start < end and stop > begin
    ]


def _ranges(places: list[Place], chosen: list[bool]) -> list[tuple[int, int]]:
    """Return the ranges of the chosen weights; neighbours make one range, with the zeros between them."""
    ranges: list[tuple[int, int]] = []
    was_chosen = False
    for place, is_chosen in zip(places, chosen, strict=True):
        if is_chosen:
            ranges.append((ranges.pop()[0] if was_chosen else place.start, place.end))
        was_chosen = is_chosen
    return ranges
