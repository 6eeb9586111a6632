"""megatron-core's parallel linears with a frozen FP8 or NF4 weight, for the GEMMs of the hand-written layer.

An FP8 weight is stored as a uint8 parameter, so that nothing casts it; all TP ranks share one scale. Checkpoints hold
weights in BF16 or FP32, which are quantised on load. Checkpoints of `jobs.tasks.convert weights --fp8` hold them in FP8
with their scale.
"""

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from bench.contract.checkpoint import Stored
from jobs.engines.megatron.lora import LoraColumnParallelLinear, LoraRowParallelLinear
from jobs.engines.megatron.quantize import BF16, STORED, STORED_SCALE, Quantized, amax, quantize_weight, weight_scale
from jobs.weights import nf4
from jobs.weights.nf4 import BLOCK, STORED_ABSMAX, Nf4

if TYPE_CHECKING:  # the mixins precede this class or RowParallelLinear in the list of base classes
    from megatron.core.tensor_parallel import ColumnParallelLinear as _Linear
else:
    _Linear = object


class _Fp8Weight(_Linear):
    """Stores a parallel linear's weight in FP8; the linear's own forward method is never called.

    weight_dtype: the data type of the stored values, `Fp8Ops.quantized_dtype`.
    """

    weight: Parameter
    tp_group: ProcessGroup

    def __init__(self, *args: Any, weight_dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight_dtype = weight_dtype
        self._store(self.weight.data)

    @property
    def quantized(self) -> Quantized:
        """The weight [O, I] of this TP rank, with its scale repeated as the GEMMs need it."""
        return Quantized(self.weight.view(self.weight_dtype), self.repeated_scale)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weight in the format of the checkpoint.

        For an FP8 checkpoint: the FP8 values and their scale, loaded in place. Otherwise: a meta tensor in the model's
        data type, for which the caller that loads a checkpoint allocates memory.
        """
        stored, values = self.weight, self.quantized.values
        is_fp8 = metadata["stored"] is Stored.fp8
        as_saved = values if is_fp8 else torch.empty(values.shape, dtype=self.config.params_dtype, device="meta")
        self.weight = Parameter(as_saved, requires_grad=False)
        try:
            state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self.weight = stored
        if is_fp8:
            groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
            key = f"{prefix}{STORED_SCALE}"
            state[f"{prefix}weight"].key = f"{prefix}{STORED}"
            state[key] = make_sharded_tensor_for_checkpoint(self.weight_scale, key, sharded_offsets, **groups)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight, scale = (state_dict.pop(f"{prefix}{name}", None) for name in ("weight", STORED_SCALE))
        if weight is not None and scale is None:  # with a scale, the weight was loaded in place
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
        """Store the scale once per row of the weight or of its transpose: FP8 GEMMs do not broadcast a scale."""
        self.repeated_scale = self.weight_scale.expand(max(self.weight.shape)).contiguous()


class Fp8ColumnParallelLinear(_Fp8Weight, ColumnParallelLinear):
    """The output is split over TP."""


class Fp8RowParallelLinear(_Fp8Weight, RowParallelLinear):
    """The input is split over TP."""


class LoraFp8ColumnParallelLinear(_Fp8Weight, LoraColumnParallelLinear):
    """Output split over TP, with adapters."""


class LoraFp8RowParallelLinear(_Fp8Weight, LoraRowParallelLinear):
    """Input split over TP, with adapters."""


FP8_LINEARS = (Fp8ColumnParallelLinear, LoraFp8ColumnParallelLinear, Fp8RowParallelLinear, LoraFp8RowParallelLinear)
"""Column-parallel without and with adapters, row-parallel without and with adapters."""


class _Nf4Weight(_Linear):
    """Stores a parallel linear's weight in NF4; the linear's own forward method is never called."""

    tp_dim: int
    """The axis of the weight that TP splits."""
    weight: Parameter
    tp_group: ProcessGroup

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._store(self.weight.data)

    @property
    def shape(self) -> tuple[int, int]:
        """O and I of this TP rank."""
        num_out, half = self.weight.shape
        return num_out, 2 * half

    @property
    def nf4(self) -> Nf4:
        """The weight of this TP rank."""
        scales = self.absmax_scales.view(torch.float32)
        return Nf4(self.weight, self.absmax, scales[:-1], scales[-1:])

    @property
    def quantized(self) -> Quantized:
        """The weight [O, I] of this TP rank, dequantised."""
        return Quantized(nf4.dequantize(self.nf4, self.config.params_dtype), None)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weight in the format of the checkpoint.

        For an NF4 checkpoint: the 4-bit codes, loaded in place, and the absmax. Otherwise: the weight in the model's
        data type. The caller that loads a checkpoint allocates memory for meta tensors.
        """
        stored, is_nf4 = self.weight, metadata["stored"] is Stored.nf4
        as_saved = stored.data if is_nf4 else torch.empty(self.shape, dtype=self.config.params_dtype, device="meta")
        self.weight = Parameter(as_saved, requires_grad=False)
        try:
            state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        finally:
            self.weight = stored
        for name in ("absmax", "absmax_scales"):
            del state[f"{prefix}{name}"]
        if is_nf4:
            state[f"{prefix}weight"].key = f"{prefix}{nf4.STORED}"
            state[f"{prefix}{STORED_ABSMAX}"] = self._sharded_absmax(prefix, sharded_offsets, metadata)
        return state

    def _sharded_absmax(self, prefix: str, sharded_offsets: tuple[Any, ...], metadata: dict[str, Any]) -> Any:
        num_out, num_in = self.shape
        sharded = make_tp_sharded_tensor_for_checkpoint(
            torch.empty(num_out, num_in // BLOCK, dtype=BF16, device="meta"),
            f"{prefix}{STORED_ABSMAX}",
            self.tp_dim,
            prepend_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        # Gates and ups are split over the TP ranks separately; megatron-core's MLP does this for the weight only.
        return apply_swiglu_sharded_factory(sharded, sharded_offsets) if "linear_fc1." in prefix else sharded

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        weight, absmax = (state_dict.pop(f"{prefix}{name}", None) for name in ("weight", STORED_ABSMAX))
        if absmax is not None:  # with absmax, the weight was loaded in place
            self._store_absmax(absmax.to(self.weight.device))
        elif weight is not None:
            self._store(weight.to(self.weight.device))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _store(self, weight_OI: Tensor) -> None:
        codes, absmax_OK = nf4.quantize_blocks(weight_OI)
        self.weight = Parameter(codes, requires_grad=False)
        self._store_absmax(absmax_OK)

    def _store_absmax(self, absmax_OK: Tensor) -> None:
        absmax, scales, offset = nf4.quantize_absmax(absmax_OK)
        self.absmax = Parameter(absmax, requires_grad=False)
        self.absmax_scales = Parameter(torch.cat([scales, offset]).view(torch.uint8), requires_grad=False)


class Nf4ColumnParallelLinear(_Nf4Weight, ColumnParallelLinear):
    """The output is split over TP."""

    tp_dim = 0


class Nf4RowParallelLinear(_Nf4Weight, RowParallelLinear):
    """The input is split over TP."""

    tp_dim = 1


class LoraNf4ColumnParallelLinear(_Nf4Weight, LoraColumnParallelLinear):
    """Output split over TP, with adapters."""

    tp_dim = 0


class LoraNf4RowParallelLinear(_Nf4Weight, LoraRowParallelLinear):
    """Input split over TP, with adapters."""

    tp_dim = 1


NF4_LINEARS = (Nf4ColumnParallelLinear, LoraNf4ColumnParallelLinear, Nf4RowParallelLinear, LoraNf4RowParallelLinear)
"""Column-parallel without and with adapters, row-parallel without and with adapters."""
