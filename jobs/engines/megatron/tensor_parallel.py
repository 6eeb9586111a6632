"""Tensor-parallel collectives around a linear: rows are gathered before it, partial sums are reduced after it.

In the backward pass it is the other way round. Between the linears each rank holds a part of the rows under SP, and all
rows without SP. With tp = 1 there are no collectives.

A collective whose result is used at once is not asynchronous: NCCL's kernel then runs on the current stream, which
takes the host less time than a second stream with its events, and the GPU too (torch 2.8 and later).
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from jobs.engines.megatron.quantize import Quantized

T = TypeVar("T")


class ParallelLinear(Protocol):
    """The attributes of megatron-core's parallel linears that are used here; megatron-core has no type hints."""

    weight: Parameter
    bias: Parameter | None
    tp_group: ProcessGroup


@dataclass(slots=True)
class Pending(Generic[T]):
    """The result of collectives that may still run, concurrently with GEMMs that are launched meanwhile."""

    result: T
    collectives: list[torch.distributed.Work]

    def wait(self) -> T:
        """Return the result; kernels that are launched from now on may read it. The host does not wait for the GPU."""
        while self.collectives:
            self.collectives.pop().wait()
        return self.result


class TensorParallel:
    """The TP ranks of a layer."""

    def __init__(self, group: ProcessGroup, sp: bool) -> None:
        self.group, self.sp, self.size, self.rank = group, sp, group.size(), group.rank()

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of the ranks."""
        return self._gather(x, async_op=False).result

    def start_gather(self, x: Tensor) -> Pending[Tensor]:
        """Start `gather`."""
        return self._gather(x, async_op=True)

    def gather_quantized(self, x: Quantized) -> Quantized:
        """Return the rows of all ranks; FP8 sends half the bytes of BF16."""
        return self._gather_quantized(x, async_op=False).result

    def start_gather_quantized(self, x: Quantized) -> Pending[Quantized]:
        """Start `gather_quantized`."""
        return self._gather_quantized(x, async_op=True)

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks; under SP only of this rank's rows."""
        return self._reduce(x, async_op=False).result

    def start_reduce(self, x: Tensor) -> Pending[Tensor]:
        """Start `reduce`."""
        return self._reduce(x, async_op=True)

    def _gather(self, x: Tensor, *, async_op: bool) -> Pending[Tensor]:
        if not self.sp:
            return Pending(x, [])
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        work = torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=self.group, async_op=async_op)
        return _pending(out, work)

    def _gather_quantized(self, x: Quantized, *, async_op: bool) -> Pending[Quantized]:
        if x.scale is None:
            values = self._gather(x.values, async_op=async_op)
            return Pending(Quantized(values.result, None), values.collectives)
        values = self._gather(x.values.view(torch.uint8), async_op=async_op)
        scale = self._gather(x.scale, async_op=async_op)
        result = Quantized(values.result.view(x.values.dtype), scale.result)
        return Pending(result, values.collectives + scale.collectives)

    def _reduce(self, x: Tensor, *, async_op: bool) -> Pending[Tensor]:
        if self.size == 1:
            return Pending(x, [])
        if not self.sp:
            return _pending(x, torch.distributed.all_reduce(x, group=self.group, async_op=async_op))
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        work = torch.distributed.reduce_scatter_tensor(out, x.contiguous(), group=self.group, async_op=async_op)
        return _pending(out, work)


def _pending(result: T, work: torch.distributed.Work | None) -> Pending[T]:
    return Pending(result, [] if work is None else [work])
