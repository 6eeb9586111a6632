"""megatron-core's parallel linears with a frozen FP8 weight, made from BF16 once: what the hand-written layer multiplies with.

The weight is a uint8 parameter, so that nothing casts it; its scale is one number for all TP ranks. Checkpoints hold it in
BF16 or FP32, and it is quantised as it is loaded.
"""

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Parameter

from jobs.megatron.fp8.quantized import FP8, LARGEST, SMALLEST_AMAX, Quantized
from jobs.megatron.lora import LoraColumnParallelLinear, LoraRowParallelLinear


class _Fp8Weight:
    """What turns a parallel linear's weight into FP8; its own forward is never called."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._store(self.weight.data)

    @property
    def quantized(self) -> Quantized:
        """The weight [O, I] of this TP rank, with its scale [1]."""
        return Quantized(self.weight.view(FP8), self.weight_scale)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the weight as checkpoints hold it, as a tensor without memory: who loads it gives it some."""
        stored, shape = self.weight, self.quantized.values.shape
        self.weight = Parameter(torch.empty(shape, dtype=self.config.params_dtype, device="meta"))
        try:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self.weight = stored

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if (weight := state_dict.pop(f"{prefix}weight", None)) is not None:
            self._store(weight.to(self.weight.device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _store(self, weight_OI: Tensor) -> None:
        amax = weight_OI.abs().max().float().view(1)
        if self.tp_group.size() > 1:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=self.tp_group)
        self.weight_scale = amax.clamp(min=SMALLEST_AMAX) / LARGEST
        values = (weight_OI.float() / self.weight_scale).to(FP8)
        self.weight = Parameter(values.view(torch.uint8), requires_grad=False)


class Fp8ColumnParallelLinear(_Fp8Weight, ColumnParallelLinear):
    """Output split over TP."""


class Fp8RowParallelLinear(_Fp8Weight, RowParallelLinear):
    """Input split over TP."""


class LoraFp8ColumnParallelLinear(_Fp8Weight, LoraColumnParallelLinear):
    """Output split over TP, with adapters."""


class LoraFp8RowParallelLinear(_Fp8Weight, LoraRowParallelLinear):
    """Input split over TP, with adapters."""
