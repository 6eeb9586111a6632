"""The collectives of tensor parallelism around a linear: rows are gathered before it, partial sums reduced after it.

In the backward pass it is the other way round. Under SP each rank holds a part of the rows between the linears, and
without SP all of them. With tp 1 there is nothing to do.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from jobs.engines.megatron.fp8.quantize import Quantized


class TensorParallel:
    """The TP ranks of a layer."""

    def __init__(self, group: ProcessGroup, sp: bool) -> None:
        self.group, self.sp, self.size, self.rank = group, sp, group.size(), group.rank()

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of the ranks."""
        if not self.sp:
            return x
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out

    def gather_quantized(self, x: Quantized) -> Quantized:
        """Return the rows of all ranks; FP8 moves half the bytes of BF16."""
        if not self.sp:
            return x
        if x.scale is None:
            return Quantized(self.gather(x.values), None)
        values = self.gather(x.values.view(torch.uint8)).view(x.values.dtype)
        return Quantized(values, self.gather(x.scale))

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, of this rank's rows under SP."""
        if self.size == 1:
            return x
        if not self.sp:
            torch.distributed.all_reduce(x, group=self.group)
            return x
        out = x.new_empty(len(x) // self.size, *x.shape[1:])
        torch.distributed.reduce_scatter_tensor(out, x.contiguous(), group=self.group)
        return out
