"""megatron-core's parallel linears with a frozen FP8 weight, for the GEMMs of the hand-written layer.

The weight is a uint8 parameter, so that nothing casts it; all TP ranks share one scale. Checkpoints hold it in BF16 or
FP32, and it is quantised when it is loaded. Checkpoints of `jobs.tasks.convert weights --fp8` hold it in FP8 with its
scale.
"""

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from bench.contract.checkpoint import Stored
from jobs.engines.megatron.fp8.quantize import STORED, STORED_SCALE, Quantized, amax, quantize_weight, weight_scale
from jobs.engines.megatron.lora import LoraColumnParallelLinear, LoraRowParallelLinear


class _Fp8Weight:
    """Stores a parallel linear's weight in FP8; the linear's own forward is never called.

    weight_dtype: the dtype of the stored numbers, `Fp8Ops.quantized_dtype`.
    """

    def __init__(self, *args, weight_dtype: torch.dtype, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight_dtype = weight_dtype
        self._store(self.weight.data)

    @property
    def quantized(self) -> Quantized:
        """The weight [O, I] of this TP rank, with its scale, repeated as often as GEMMs ask for it."""
        return Quantized(self.weight.view(self.weight_dtype), self.repeated_scale)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Return the weight as checkpoints hold it.

        Of one in FP8 these are the FP8 numbers and their scale, in the memory where they belong. Otherwise it is a meta
        tensor in the model's type, for which the caller that loads a checkpoint allocates memory.
        """
        stored, values = self.weight, self.quantized.values
        is_fp8 = metadata["stored"] is Stored.fp8
        as_saved = values if is_fp8 else torch.empty(values.shape, dtype=self.config.params_dtype, device="meta")
        self.weight = Parameter(as_saved, requires_grad=False)
        try:
            state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self.weight = stored
        if is_fp8:
            groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
            key = f"{prefix}{STORED_SCALE}"
            state[f"{prefix}weight"].key = f"{prefix}{STORED}"
            state[key] = make_sharded_tensor_for_checkpoint(self.weight_scale, key, sharded_offsets, **groups)
        return state

    def _load_from_state_dict(self, state_dict, prefix, *args):
        weight, scale = (state_dict.pop(f"{prefix}{name}", None) for name in ("weight", STORED_SCALE))
        if weight is not None and scale is None:  # otherwise it was loaded in place
            self._store(weight.to(self.weight.device))
        self._repeat_scale()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _store(self, weight_OI: Tensor) -> None:
        largest = amax(weight_OI)
        if self.tp_group.size() > 1:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.tp_group)
        self.weight_scale = weight_scale(largest)
        values = quantize_weight(weight_OI, self.weight_scale, self.weight_dtype)
        self.weight = Parameter(values.view(torch.uint8), requires_grad=False)
        self._repeat_scale()

    def _repeat_scale(self) -> None:
        """Store the scale for each row of the weight or of its transpose: FP8 GEMMs take no broadcast one."""
        self.repeated_scale = self.weight_scale.expand(max(self.weight.shape)).contiguous()


class Fp8ColumnParallelLinear(_Fp8Weight, ColumnParallelLinear):
    """Output split over TP."""


class Fp8RowParallelLinear(_Fp8Weight, RowParallelLinear):
    """Input split over TP."""


class LoraFp8ColumnParallelLinear(_Fp8Weight, LoraColumnParallelLinear):
    """Output split over TP, with adapters."""


class LoraFp8RowParallelLinear(_Fp8Weight, LoraRowParallelLinear):
    """Input split over TP, with adapters."""


LINEARS = (Fp8ColumnParallelLinear, LoraFp8ColumnParallelLinear, Fp8RowParallelLinear, LoraFp8RowParallelLinear)
"""Split by output, and by input; each without adapters, and with them."""
