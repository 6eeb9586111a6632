"""The optimizer's flat shards as boxes of named tensors, so that any layout can load what another one has saved.

A shard ends anywhere in a weight. But a contiguous part of a matrix is at most three boxes: the end of a row, whole
rows, and the beginning of a row. So each rank saves what it updates, as it lies, and no rank gathers anything. The
names, sizes and offsets are those of megatron-core's sharded_state_dict.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor
from torch.nn import Parameter

from bench.contract.checkpoint import Stored
from jobs.engines.megatron.adam import Place
from jobs.engines.megatron.model import Parts

NAMES = {"master": "", "exp_avg": "optimizer.state.exp_avg.", "exp_avg_sq": "optimizer.state.exp_avg_sq."}
"""What stands before a weight's key, by the tensors of a shard. Source: megatron-core 0.16.1, DistributedOptimizer."""
MOST_ELEMENTS = 2**25
"""Of a box, for at most 128 MiB in FP32: who writes or reads one holds it in memory."""
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a shard, from `begin` on, that are a box of a tensor of the checkpoint."""

    key: str
    whole: Shape
    offset: Shape
    shape: Shape
    begin: int
    is_saved: bool
    """Whether this rank saves it; of several ranks that hold the same box one does."""

    def of(self, shard: Tensor) -> Tensor:
        """Return the box as a view of one of a shard's tensors."""
        return shard[self.begin : self.begin + prod(self.shape)].view(self.shape)


def boxes(engine: Parts) -> list[list[Box]]:
    """Return the boxes of each of the optimizer's states on this rank."""
    tensors, is_sharded = dict(_sharded_weights(engine)), engine.optimizer.is_sharded
    return [
        [box for place in state.places for box in _boxes(place, tensors[place.weight], is_sharded)]
        for state in engine.optimizer.states()
    ]


def _sharded_weights(engine: Parts) -> Iterator[tuple[Parameter, list[ShardedTensor]]]:
    """Yield each weight of this rank with the parts of global tensors that it is made of; gates and ups are two."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for chunk in engine.bare_chunks():
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": group, "stored": Stored.plain})
        for name, weight in chunk.named_parameters():
            if name in state and weight.requires_grad:
                tensor = state[name]
                yield weight, tensor.build() if isinstance(tensor, ShardedTensorFactory) else [tensor]


def _boxes(place: Place, tensors: Sequence[ShardedTensor], is_sharded: bool) -> Iterator[Box]:
    """Yield the boxes of the part of a weight that a shard holds.

    is_sharded: the replicas hold different parts; otherwise only the first of them saves.
    """
    first, last = place.offset, place.offset + place.end - place.start
    for tensor in tensors:
        assert tensor.data is not None
        start = (tensor.data.data_ptr() - place.weight.data_ptr()) // place.weight.element_size()
        begin, end = max(first, start), min(last, start + tensor.data.numel())
        *others, replica = tensor.replica_id
        is_saved = not any(others) and (is_sharded or replica == 0)
        layers = (1,) * tensor.prepend_axis_num
        at = begin
        for offset, shape in flat_range(tensor.local_shape, begin - start, end - start) if begin < end else ():
            place_in_whole = tuple(
                a + b for a, b in zip(tensor.global_offset, (*(0 for _ in layers), *offset), strict=True)
            )
            here = place.start + at - first
            yield Box(tensor.key, tensor.global_shape, place_in_whole, (*layers, *shape), here, is_saved)
            at += prod(shape)


def flat_range(shape: Shape, begin: int, end: int) -> Iterator[tuple[Shape, Shape]]:
    """Yield, in order, offset and shape of the boxes that elements `begin` to `end` of a row-major tensor make up."""
    if len(shape) == 1:
        yield from (((at,), (min(end - at, MOST_ELEMENTS),)) for at in range(begin, end, MOST_ELEMENTS))
        return
    size = prod(shape[1:])
    row = begin // size
    if begin % size or end < (row + 1) * size:  # a part of one row, up to its end or less
        stop = min(end, (row + 1) * size)
        inside = flat_range(shape[1:], begin - row * size, stop - row * size)
        yield from (((row, *offset), (1, *extent)) for offset, extent in inside)
        begin = stop
    whole_rows, most = range(-(-begin // size), end // size), max(1, MOST_ELEMENTS // size)
    for first in whole_rows[::most]:
        yield (first, *(0 for _ in shape[1:])), (min(most, whole_rows.stop - first), *shape[1:])
    begin = max(begin, whole_rows.stop * size)
    if begin < end:
        yield from flat_range(shape, begin, end)
