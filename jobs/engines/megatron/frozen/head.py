"""The frozen output layer in FP8 and its loss, for training; evaluation uses the unquantised output layer.

The weight is quantised once, with one scale, and stored in both layouts that the GEMMs need. Hidden states are
quantised row by row. The kernel that computes the gradient of the logits also quantises it, so that it is never written
in BF16. Rounding both operands to E4M3 changes a product of normal numbers by at most 2^-4 + 2^-4 + 2^-8 of it.

Shape letters: S sequence and B batch of this rank, M = S * B tokens, H hidden, V this TP rank's part of the vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from bench.contract.modules import Part
from jobs.engines.megatron.frozen.ops import Fp8Ops
from jobs.engines.megatron.loss import quantized_gradient, statistics
from jobs.engines.megatron.quantize import Quantized, amax, quantize_weight, weight_scale
from jobs.engines.megatron.tensor_parallel import TensorParallel
from jobs.profiles.ranges import profile_range

if TYPE_CHECKING:
    from megatron.core.tensor_parallel import ColumnParallelLinear

_ROWS = 4096
"""Rows of the weight that are quantised at once: an FP32 copy of all rows would take 2 GB."""


class Fp8Head:
    """The output layer of a rank, with FP8 copies of its weight.

    output_layer: megatron-core's output layer, with a frozen weight [V, H]; ops: the operations of the layers.
    """

    def __init__(self, output_layer: "ColumnParallelLinear", ops: Fp8Ops, sp: bool) -> None:
        self.output_layer, self.ops = output_layer, ops
        self.tp = TensorParallel(output_layer.tp_group, sp)
        self._weights: tuple[Quantized, Quantized] | None = None
        output_layer.register_load_state_dict_post_hook(lambda *_: self._drop_weights())

    def losses(self, hidden_SBH: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the loss [B, S] of each token in FP32."""
        losses_M: Tensor = _Losses.apply(  # type: ignore[no-untyped-call]  # torch's
            self, hidden_SBH.flatten(0, 1), labels_BS.T.flatten()
        )
        return losses_M.view(labels_BS.T.shape).T.contiguous()

    def weights(self) -> tuple[Quantized, Quantized]:
        """Return the weight in FP8, [V, H] and [H, V]."""
        if self._weights is None:
            weight_VH = self.output_layer.weight.detach()
            largest = amax(weight_VH)
            if self.tp.size > 1:
                torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=self.tp.group)
            scale, dtype = weight_scale(largest), self.ops.quantized_dtype
            assert dtype is not None
            values_VH = torch.empty_like(weight_VH, dtype=dtype)
            for part, values in zip(weight_VH.split(_ROWS), values_VH.split(_ROWS), strict=True):
                values.copy_(quantize_weight(part, scale, dtype))
            weight = Quantized(values_VH, scale.expand(max(weight_VH.shape)).contiguous())
            self._weights = weight, self.ops.transpose(weight)
        return self._weights

    def _drop_weights(self) -> None:
        """Drop the FP8 copies after a checkpoint was loaded; the next pass quantises the weight again."""
        self._weights = None


class _Losses(Function):
    @staticmethod
    def forward(ctx: Any, head: Fp8Head, hidden_MH: Tensor, labels_M: Tensor) -> Tensor:
        with profile_range(Part.head):
            hidden = head.tp.gather_quantized(head.ops.quantize(hidden_MH))
            logits_MV = head.ops.matmul(hidden, head.weights()[0])
        with profile_range(Part.loss):
            ctx.head, ctx.logits_MV, ctx.stats = head, logits_MV, statistics(logits_MV, labels_M)
        losses_M: Tensor = ctx.stats.losses_M
        return losses_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[None, Tensor, None]:
        head, logits_MV, ctx.logits_MV = ctx.head, ctx.logits_MV, None
        with profile_range(Part.loss):
            grad = quantized_gradient(logits_MV, ctx.stats, grad_M, dtype=head.ops.quantized_dtype)
        del logits_MV
        with profile_range(Part.head):
            return None, head.tp.reduce(head.ops.matmul(grad, head.weights()[1])), None
