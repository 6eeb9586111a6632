"""`Fp8Ops` in plain torch, for CPUs.

Shape letters: M rows (tokens), H hidden, F width of the MLP, D head dimension, G query groups, R queries of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from jobs.engines.megatron.hashing import hash32
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.linear_weights import QuantizedLinear, Unquantized
from jobs.engines.megatron.quantize import BF16, FP8, Adapted, Dropout, Lora, Quantized
from jobs.engines.megatron.torch_math import (
    dequantize,
    merge_heads,
    merge_normed_heads,
    norm,
    quantize_rows,
    split_heads,
    swiglu_gradient,
)


@dataclass(frozen=True)
class TorchOps:
    """`Fp8Ops` for any data types: with FP32 in place of FP8 and BF16, nothing is rounded."""

    quantized_dtype: torch.dtype | None = FP8
    output_dtype: torch.dtype = BF16
    is_nf4: bool = False

    def quantize(self, x_MH: Tensor) -> Quantized:
        if self.quantized_dtype is None:
            return Quantized(x_MH.to(self.output_dtype), None)
        return quantize_rows(x_MH, self.quantized_dtype)

    def matmul(self, x: Quantized, weight: Quantized) -> Tensor:
        y_MN = x.values.float() @ weight.values.float().T
        if x.scale is not None and weight.scale is not None:
            y_MN *= x.scale[:, None] * weight.scale[0]
        return y_MN.to(self.output_dtype)

    def transpose(self, weight: Quantized) -> Quantized:
        return Quantized(weight.values.T.contiguous(), weight.scale)

    def frozen_weights(self, linears: Sequence[Any]) -> "WeightsOnDemand | Unquantized":
        is_dense = self.quantized_dtype is None and not self.is_nf4
        return Unquantized() if is_dense else WeightsOnDemand(self)

    def norm_quantize(self, x_MH: Tensor, weight_H: Tensor, eps: float) -> tuple[Quantized, Tensor]:
        normed_MH, rstd_M = norm(x_MH, weight_H, eps)
        return self.quantize(normed_MH), rstd_M

    def add_norm_quantize(
        self, x_MH: Tensor, y_MH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Quantized, Tensor]:
        sum_MH = x_MH + y_MH
        return sum_MH, *self.norm_quantize(sum_MH, weight_H, eps)

    def norm_backward(
        self,
        grad_MH: Tensor,
        residual_MH: Tensor,
        normed: Quantized,
        rstd_M: Tensor,
        weight_H: Tensor,
        adapted: Adapted | None = None,
    ) -> Tensor:
        grad_MH, weight_H = grad_MH.float(), weight_H.float()
        if adapted:
            grad_MH = grad_MH + _with_dropout(adapted.grad.float(), adapted.drop)
        grad_MH = grad_MH * weight_H
        unit_MH = torch.where(weight_H == 0, 0, dequantize(normed) / weight_H)  # x / rms
        along_M = (grad_MH * unit_MH).mean(1)
        grad_MH = rstd_M[:, None] * (grad_MH - unit_MH * along_M[:, None])
        return (residual_MH.float() + grad_MH).to(residual_MH.dtype)

    def norm_backward_quantize(
        self, grad_MH: Tensor, residual_MH: Tensor, normed: Quantized, rstd_M: Tensor, weight_H: Tensor
    ) -> tuple[Tensor, Quantized]:
        grad_MH = self.norm_backward(grad_MH, residual_MH, normed, rstd_M, weight_H)
        return grad_MH, self.quantize(grad_MH)

    def rope(
        self,
        qkv: Tensor,
        freqs_MD: Tensor,
        groups: int,
        lora: Lora | None = None,
        bias_O: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return split_heads(qkv, bias_O, freqs_MD, groups, freqs_MD.shape[-1], lora, norms)

    def rope_backward(self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor) -> tuple[Tensor, Quantized]:
        dqkv = merge_heads(dq, dk, dv, freqs_MD).to(dq.dtype)
        return dqkv, self.quantize(dqkv)

    def normed_rope_backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor, qkv: Tensor, norms: HeadNorms
    ) -> tuple[Tensor, Quantized]:
        dqkv = merge_normed_heads(dq, dk, dv, freqs_MD, qkv, norms)[0].to(dq.dtype)
        return dqkv, self.quantize(dqkv)

    def swiglu_quantize(self, gate_up: Tensor, *, keep: bool = True) -> tuple[Quantized, Quantized | None]:
        gate_MF, up_MF = gate_up.float().chunk(2, dim=1)
        hidden = self.quantize(silu(gate_MF) * up_MF)
        if not keep:
            return hidden, None
        is_plain = self.quantized_dtype is None
        return hidden, Quantized(gate_up, None) if is_plain else self.quantize(torch.cat([gate_MF, up_MF]))

    def swiglu_backward_quantize(self, grad_MF: Tensor, gate_up: Quantized) -> Quantized:
        gate_MF, up_MF = dequantize(gate_up).chunk(2, dim=1 if gate_up.scale is None else 0)
        return self.quantize(swiglu_gradient(grad_MF, gate_MF, up_MF))

    def down(self, x: Tensor | Quantized, a_RI: Tensor, drop: Dropout) -> Tensor:
        return (_with_dropout(dequantize(x), drop) @ a_RI.float().T).to(self.output_dtype)

    def down_backward(self, low_grad_MR: Tensor, x: Tensor | Quantized, drop: Dropout) -> Tensor:
        return (low_grad_MR.float().T @ _with_dropout(dequantize(x), drop)).to(self.output_dtype)

    def add_down_gradient(self, grad_MI: Tensor, low_grad_MR: Tensor, a_RI: Tensor, drop: Dropout) -> Tensor:
        return grad_MI.copy_(grad_MI.float() + _with_dropout(low_grad_MR.float() @ a_RI.float(), drop))


@dataclass(frozen=True)
class WeightsOnDemand:
    """`FrozenWeights` without prefetching: a weight is transposed or dequantised when it is requested."""

    ops: TorchOps

    def forward(self, linear: QuantizedLinear) -> Quantized:
        return linear.quantized

    def backward(self, linear: QuantizedLinear) -> Quantized:
        return self.ops.transpose(linear.quantized)


def _with_dropout(x_MH: Tensor, drop: Dropout) -> Tensor:
    """Return dropout(x) with the mask that `Dropout` defines."""
    if not drop.threshold:
        return x_MH
    index = torch.arange(x_MH.numel(), device=x_MH.device).view_as(x_MH)
    bits = hash32(index // 2 ^ drop.seed)
    bits = torch.where(index % 2 == 0, bits & 0xFFFF, bits >> 16)
    return torch.where(bits >= drop.threshold, x_MH * drop.scale, 0)
