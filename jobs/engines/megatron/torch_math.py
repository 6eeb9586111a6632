"""Row quantisation, RMSNorm, the gradient of SwiGLU, and RoPE in plain torch, for CPUs."""

import torch
from torch import Tensor

from jobs.engines.megatron.quantize import LARGEST, SMALLEST_AMAX, Quantized


def quantize_rows(x_MH: Tensor, dtype: torch.dtype) -> Quantized:
    """Return the rows in `dtype`, each with its own scale."""
    x_MH = x_MH.float()
    scale_M = x_MH.abs().amax(1).clamp(min=SMALLEST_AMAX) / LARGEST
    return Quantized((x_MH / scale_M[:, None]).to(dtype), scale_M)


def dequantize(x: Tensor | Quantized) -> Tensor:
    """Return the values in FP32."""
    if isinstance(x, Tensor):
        return x.float()
    return x.values.float() if x.scale is None else x.values.float() * x.scale[:, None]


def swiglu_gradient(grad_MF: Tensor, gate_MF: Tensor, up_MF: Tensor) -> Tensor:
    """Return the gradient of gate and up [M, 2 F] in FP32, from the gradient of silu(gate) * up."""
    grad_MF, sigmoid_MF = grad_MF.float(), gate_MF.sigmoid()
    gate_grad_MF = grad_MF * up_MF * sigmoid_MF * (1 + gate_MF * (1 - sigmoid_MF))
    return torch.cat([gate_grad_MF, grad_MF * gate_MF * sigmoid_MF], dim=1)


def norm(x_MH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm in FP32 and 1 / rms [M]."""
    x_MH = x_MH.float()
    rstd_M = torch.rsqrt(x_MH.square().mean(1) + eps)
    return x_MH * rstd_M[:, None] * weight_H.float(), rstd_M


def rotate(x: Tensor, cos_MD: Tensor, sin_MD: Tensor) -> Tensor:
    """Return heads [M, ..., D] rotated by the angles; coordinates i and i + D / 2 of a head are rotated together."""
    cos, sin = (part.view(len(x), *[1] * (x.dim() - 2), -1) for part in (cos_MD, sin_MD))
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin
