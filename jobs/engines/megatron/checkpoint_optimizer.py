"""The optimizer's flat shards as boxes (rectangular blocks) of named tensors, so that any layout can load them.

A shard may begin and end inside a weight. But a contiguous part of a matrix is at most three boxes: the end of a row,
full rows, and the beginning of a row. So each rank saves the elements that it updates, without a gather. Names, sizes
and offsets are those of megatron-core's sharded_state_dict.
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
from jobs.engines.megatron.model import ModelAndOptimizer
from jobs.weights.boxes import Shape, flat_range

NAMES = {"master": "", "exp_avg": "optimizer.state.exp_avg.", "exp_avg_sq": "optimizer.state.exp_avg_sq."}
"""The prefix of a weight's key, by tensor of a shard. Source: megatron-core 0.16.1, DistributedOptimizer."""


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a shard, starting at `begin`, that are a box of a tensor of the checkpoint."""

    key: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    begin: int
    is_saved: bool
    """Whether this rank saves the box: one of the ranks that hold it does."""

    def view_of(self, shard: Tensor) -> Tensor:
        """Return the box as a view of one of a shard's tensors."""
        return shard[self.begin : self.begin + prod(self.shape)].view(self.shape)


def boxes(engine: ModelAndOptimizer) -> list[list[Box]]:
    """Return the boxes of each optimizer state on this rank."""
    tensors, is_sharded = dict(_sharded_weights(engine)), engine.optimizer.is_sharded
    return [
        [box for place in state.places for box in _boxes(place, tensors[place.weight], is_sharded)]
        for state in engine.optimizer.states()
    ]


def _sharded_weights(engine: ModelAndOptimizer) -> Iterator[tuple[Parameter, list[ShardedTensor]]]:
    """Yield each weight of this rank with its parts of global tensors; gate and up are two parts."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for chunk in engine.unwrapped_chunks():
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": group, "stored": Stored.plain})
        for name, weight in chunk.named_parameters():
            if name in state and weight.requires_grad:
                tensor = state[name]
                yield weight, tensor.build() if isinstance(tensor, ShardedTensorFactory) else [tensor]


def _boxes(place: Place, tensors: Sequence[ShardedTensor], is_sharded: bool) -> Iterator[Box]:
    """Yield the boxes of the part of a weight that a shard holds.

    is_sharded: the replicas hold different parts; otherwise only the first replica saves.
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
            global_offset = tuple(
                a + b for a, b in zip(tensor.global_offset, (*(0 for _ in layers), *offset), strict=True)
            )
            begin_in_shard = place.start + at - first
            yield Box(tensor.key, tensor.global_shape, global_offset, (*layers, *shape), begin_in_shard, is_saved)
            at += prod(shape)
