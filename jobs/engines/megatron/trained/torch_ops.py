"""`TrainedOps` in plain torch, for CPUs and for FP32.

Shape letters are those of `ops`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from jobs.engines.megatron.head_norms import HeadNormGradients, HeadNorms
from jobs.engines.megatron.linear_weights import Unquantized
from jobs.engines.megatron.quantize import BF16, FP8, amax, quantize_weight, weight_scale
from jobs.engines.megatron.tensor_parallel import ParallelLinear
from jobs.engines.megatron.torch_math import (
    dequantize,
    merge_heads,
    merge_normed_heads,
    quantize_rows,
    split_heads,
    swiglu_gradient,
)
from jobs.engines.megatron.trained.ops import NormGradients, NormStats, NormWeights, Operand


@dataclass(frozen=True)
class PlainTorchOps:
    """`TrainedOps` in FP32 or BF16. Everything except GEMMs is computed in FP32 and rounded once."""

    dtype: torch.dtype

    def linear_weights(self, linears: Sequence[ParallelLinear]) -> "Unquantized | Fp8Weights":
        return Unquantized()

    def operand(self, x_MH: Tensor) -> Operand:
        return Operand(x_MH.to(self.dtype))

    def matmul(self, x: Operand, weight: Operand) -> Tensor:
        return x.values @ weight.values.T

    def add_weight_gradient(self, main_grad_OI: Tensor, grad: Operand, x: Operand) -> None:
        main_grad_OI.addmm_(grad.values.float().T, x.values.float())

    def column_sum(self, x: Tensor | Operand) -> Tensor:
        return dequantize(x).sum(0)

    def norm(self, x_MH: Tensor, weights: NormWeights) -> tuple[Operand, NormStats]:
        x_MH = x_MH.float()
        mean_M = None if weights.bias_H is None else x_MH.mean(1)
        centred_MH = x_MH if mean_M is None else x_MH - mean_M[:, None]
        stats = NormStats(torch.rsqrt(centred_MH.square().mean(1) + weights.eps), mean_M)
        return self.recompute_norm(x_MH, stats, weights), stats

    def add_norm(
        self, x_MH: Tensor, y_MH: Tensor, bias_H: Tensor | None, weights: NormWeights
    ) -> tuple[Tensor, Operand, NormStats]:
        sum_MH = _add_bias(x_MH.float() + y_MH.float(), bias_H).to(self.dtype)
        return sum_MH, *self.norm(sum_MH, weights)

    def recompute_norm(self, x_MH: Tensor, stats: NormStats, weights: NormWeights) -> Operand:
        return self.operand(_add_bias(_normalized(x_MH, stats) * weights.weight_H.float(), weights.bias_H))

    def norm_backward(
        self, grad_MH: Tensor, residual_MH: Tensor, x_MH: Tensor, stats: NormStats, weights: NormWeights
    ) -> tuple[Tensor, Operand, NormGradients]:
        grad_MH, unit_MH = grad_MH.float(), _normalized(x_MH, stats)
        bias_grad_H = None if weights.bias_H is None else grad_MH.sum(0)
        gradients = NormGradients((grad_MH * unit_MH).sum(0), bias_grad_H)
        grad_MH = grad_MH * weights.weight_H.float()
        along_MH = unit_MH * (grad_MH * unit_MH).mean(1, keepdim=True)
        if weights.bias_H is not None:
            along_MH = along_MH + grad_MH.mean(1, keepdim=True)
        dx_MH = (residual_MH.float() + stats.rstd_M[:, None] * (grad_MH - along_MH)).to(self.dtype)
        return dx_MH, self.operand(dx_MH), gradients

    def split_heads(
        self,
        qkv_MO: Tensor,
        bias_O: Tensor | None,
        freqs_MD: Tensor | None,
        groups: int,
        head_dim: int,
        norms: HeadNorms | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return split_heads(qkv_MO, bias_O, freqs_MD, groups, head_dim, norms=norms)

    def merge_heads(self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor | None) -> Operand:
        return self.operand(merge_heads(dq, dk, dv, freqs_MD))

    def merge_normed_heads(
        self, dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor | None, qkv_MO: Tensor, norms: HeadNorms
    ) -> tuple[Operand, HeadNormGradients]:
        grad_MO, gradients = merge_normed_heads(dq, dk, dv, freqs_MD, qkv_MO, norms)
        return self.operand(grad_MO), gradients

    def swiglu(self, gate_up_M2F: Tensor) -> tuple[Operand, Operand]:
        gate_MF, up_MF = gate_up_M2F.float().chunk(2, dim=1)
        return self.operand(silu(gate_MF) * up_MF), self.operand(torch.cat([gate_MF, up_MF]))

    def swiglu_backward(self, grad_MF: Tensor, saved: Operand) -> tuple[Operand, Operand]:
        gate_MF, up_MF = dequantize(saved).chunk(2)
        return self.operand(swiglu_gradient(grad_MF, gate_MF, up_MF)), self.operand(silu(gate_MF) * up_MF)

    def gelu(self, x_MF: Tensor, bias_F: Tensor | None) -> tuple[Operand, Operand]:
        x_MF = _add_bias(x_MF.float(), bias_F)
        return self.operand(gelu(x_MF)), self.operand(x_MF)

    def gelu_backward(self, grad_MF: Tensor, saved: Operand) -> tuple[Operand, Operand]:
        x_MF = dequantize(saved)
        return self.operand(torch.ops.aten.gelu_backward(grad_MF.float(), x_MF)), self.operand(gelu(x_MF))


@dataclass(frozen=True)
class Fp8TorchOps(PlainTorchOps):
    """`TrainedOps` with FP8 operands; activations between GEMMs and weights have the data type `dtype`."""

    dtype: torch.dtype = BF16

    def linear_weights(self, linears: Sequence[ParallelLinear]) -> "Fp8Weights":
        return Fp8Weights(linears)

    def operand(self, x_MH: Tensor) -> Operand:
        return quantize_rows(x_MH, FP8)

    def matmul(self, x: Operand, weight: Operand) -> Tensor:
        return (dequantize(x) @ dequantize(weight).T).to(self.dtype)

    def add_weight_gradient(self, main_grad_OI: Tensor, grad: Operand, x: Operand) -> None:
        main_grad_OI.addmm_(dequantize(with_one_scale(grad)).T, dequantize(with_one_scale(x)))


class Fp8Weights:
    """`LinearWeights` with FP8 copies, each with one scale [1], which the TP ranks of a weight share."""

    def __init__(self, linears: Sequence[ParallelLinear]) -> None:
        self.linears, self.copies = linears, dict[ParallelLinear, Operand]()

    def forward(self, linear: ParallelLinear) -> Operand:
        return self.copies[linear]

    def backward(self, linear: ParallelLinear) -> Operand:
        weight_OI, scale = self.copies[linear]
        return Operand(weight_OI.T, scale)

    def refresh(self, linears: Sequence[ParallelLinear] | None = None) -> None:
        for linear in linears or self.linears:
            weight_OI = linear.weight.detach()
            largest = amax(weight_OI)
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=linear.tp_group)
            scale = weight_scale(largest)
            self.copies[linear] = Operand(quantize_weight(weight_OI, scale), scale)


def with_one_scale(x: Operand) -> Operand:
    """Return FP8 rows rescaled to the largest of their scales [1], because a sum over rows needs one common scale."""
    assert x.scale is not None
    largest = x.scale.amax(0, keepdim=True)
    return Operand((x.values.float() * (x.scale / largest)[:, None]).to(FP8), largest)


def _add_bias(x_MH: Tensor, bias_H: Tensor | None) -> Tensor:
    return x_MH if bias_H is None else x_MH + bias_H.float()


def _normalized(x_MH: Tensor, stats: NormStats) -> Tensor:
    """Return a norm's output in FP32, before its weight and bias are applied."""
    x_MH = x_MH.float() if stats.mean_M is None else x_MH.float() - stats.mean_M[:, None]
    return x_MH * stats.rstd_M[:, None]
