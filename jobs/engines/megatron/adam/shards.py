"""The optimizer shards of a rank: its parts of the buckets of megatron-core's gradient buffers.

A bucket holds the gradients of many weights in one tensor. With the distributed optimizer each DP (and CP) rank updates
its part of every bucket, otherwise the full bucket. A rank holds FP32 master weights of the elements that it updates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor
from torch.nn import Parameter

BucketGroup = Any
"""megatron-core's _ParamAndGradBucketGroup: the buckets that are reduced and gathered together."""
BLOCK = 2048
"""Elements per program of a kernel."""
_END = 2**62
"""A bound after every element."""


class RangeTable(NamedTuple):
    """Ranges of elements in order, which do not touch, with lookup tables for the kernels.

    An element is inside a range if an odd number of bounds (starts and ends of ranges) are at or before it.
    """

    ranges: list[tuple[int, int]]
    bounds: Tensor
    """All bounds in order, padded with _END, so that every program can read `max_bounds_in_block` bounds."""
    passed: Tensor
    """For each block of BLOCK elements: how many bounds are at or before its first element."""
    max_bounds_in_block: int
    """The largest number of further bounds in one block."""


def range_table(ranges: list[tuple[int, int]], length: int, device: torch.device) -> RangeTable:
    """Return the table of ranges of a tensor of this length, on the device."""
    bounds = np.array([bound for pair in ranges for bound in pair], dtype=np.int64)
    first = np.arange(0, length, BLOCK)
    passed = np.searchsorted(bounds, first, side="right")
    in_block = np.searchsorted(bounds, np.minimum(first + BLOCK, length), side="left") - passed
    most = int(in_block.max(initial=0))
    padded = np.append(bounds, [_END] * (most + 1))
    device_bounds, device_passed = (torch.from_numpy(x).to(device) for x in (padded, passed.astype(np.int32)))
    return RangeTable(ranges, device_bounds, device_passed, most)


class Place(NamedTuple):
    """The place of a weight in a shard: elements start to end are those of the flat weight, starting at `offset`."""

    start: int
    end: int
    weight: Parameter
    offset: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a bucket that this rank updates. Its tensors are flat and equally long; padding is 0."""

    bucket: int
    """The number of the bucket, the same on all replicas."""
    first: int
    """The index of the shard's first element in the bucket."""
    grad: Tensor
    master: Tensor
    """In FP32, like the gradient."""
    weights: Tensor
    """The weights of the model."""
    places: list[Place]
    counted: RangeTable
    """The gradients that this rank contributes to the norm; over all ranks each gradient counts once."""
    decayed: RangeTable
    """The weights with weight decay: matrices."""

    def part(self, begin: int, end: int) -> "Shard":
        """Return the elements from begin to end as a shard."""
        end = min(end, len(self.grad))
        grad, master, weights = (x[begin:end] for x in (self.grad, self.master, self.weights))
        return _shard(self.bucket, self.first + begin, grad, master, weights, _clip_places(self.places, begin, end))


def shards_of(chunks: list[DistributedDataParallel], *, is_sharded: bool) -> list[Shard]:
    """Return this rank's part of every bucket; is_sharded: each replica updates a part."""
    return [
        _shard_of(number, buffer, bucket, is_sharded)
        for number, (buffer, bucket) in enumerate(_buffers_and_buckets(chunks))
    ]


def buckets_of(chunks: list[DistributedDataParallel]) -> list[Any]:
    """Return all buckets of a rank, by number."""
    return [bucket for _, bucket in _buffers_and_buckets(chunks)]


def _buffers_and_buckets(chunks: list[DistributedDataParallel]) -> Iterator[tuple[Any, Any]]:
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield from ((buffer, bucket) for bucket in buffer.buckets)


def bucket_groups(chunks: list[DistributedDataParallel]) -> list[BucketGroup]:
    """Return the bucket groups of a rank in the order in which the forward pass needs their weights."""
    return [group for chunk in chunks for group in _in_forward_order(chunk)]


def _in_forward_order(chunk: DistributedDataParallel) -> list[BucketGroup]:
    place = {weight: number for number, weight in enumerate(chunk.parameters())}
    groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    return sorted(groups, key=lambda group: min(place[weight] for weight in group.params))


def finish_gather(group: BucketGroup) -> None:
    """Let the current stream wait for the weights of a group, if they are being gathered."""
    if group.param_gather_handle is not None:
        group.finish_param_sync(skip_next_bucket_dispatch=True)


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
    weights = bucket.param_data[first:last] if is_sharded else _flatten_weights(places, length)
    master = torch.zeros(length, dtype=torch.float32, device=weights.device)
    return _shard(number, first, bucket.grad_data[first:last], master, weights, _clip_places(places, first, last))


def _flatten_weights(places: list[Place], length: int) -> Tensor:
    """Move the weights of a bucket into one flat tensor, as the distributed optimizer does, and return it."""
    like = places[0].weight
    flat = torch.zeros(length, dtype=like.dtype, device=like.device)
    for start, end, weight, _ in places:
        flat[start:end].copy_(weight.data.view(-1))
        weight.data = flat[start:end].view(weight.shape)
    return flat


def _shard(bucket: int, first: int, grad: Tensor, master: Tensor, weights: Tensor, places: list[Place]) -> Shard:
    counts = [param_is_not_shared(p.weight) and param_is_not_tensor_parallel_duplicate(p.weight) for p in places]
    decays = [place.weight.dim() > 1 for place in places]
    counted, decayed = (range_table(_ranges(places, chosen), len(grad), grad.device) for chosen in (counts, decays))
    return Shard(bucket, first, grad, master, weights, places, counted, decayed)


def _clip_places(places: list[Place], begin: int, end: int) -> list[Place]:
    """Return the places between begin and end, relative to begin."""
    return [
        Place(max(start - begin, 0), min(stop, end) - begin, weight, offset + max(begin - start, 0))
        for start, stop, weight, offset in places
        if start < end and stop > begin
    ]


def _ranges(places: list[Place], chosen: list[bool]) -> list[tuple[int, int]]:
    """Return the ranges of the chosen weights; neighbours become one range, including the padding between them."""
    ranges: list[tuple[int, int]] = []
    was_chosen = False
    for place, is_chosen in zip(places, chosen, strict=True):
        if is_chosen:
            ranges.append((ranges.pop()[0] if was_chosen else place.start, place.end))
        was_chosen = is_chosen
    return ranges
