"""Row quantisation, RMSNorm, the gradient of SwiGLU, and what is between qkv and attention in plain torch, for CPUs."""

import torch
from torch import Tensor

from jobs.engines.megatron.head_norms import HeadNormGradients, HeadNorms
from jobs.engines.megatron.quantize import LARGEST, SMALLEST_AMAX, Lora, Quantized


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


def split_heads(
    qkv: Tensor,
    bias_O: Tensor | None,
    freqs_MD: Tensor | None,
    groups: int,
    head_dim: int,
    lora: Lora | None = None,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [M, N, D], k and v [M, G, D] in the data type of qkv; see `rope_kernels.split_heads`."""
    dtype, rows = qkv.dtype, qkv.float()
    if bias_O is not None:
        rows = rows + bias_O.float()
    if lora:
        rows = rows + lora.scale * (lora.low.float() @ lora.b.float().T)
    if norms:
        rows = qkv.copy_(rows).float()
    heads = rows.view(len(qkv), groups, -1, head_dim)
    q, k, v = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2], heads[:, :, -1]
    if norms:
        q, k = (x * _rstd(x, norms.eps) * w.float() for x, w in ((q, norms.q_D), (k, norms.k_D)))
    if freqs_MD is not None:
        q, k = (rotate(x, freqs_MD.cos(), freqs_MD.sin()) for x in (q, k))
    return q.to(dtype).contiguous(), k.to(dtype).contiguous(), v.to(dtype).contiguous()


def merge_heads(dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor | None) -> Tensor:
    """Return the gradient of the qkv rows [M, O] of `split_heads` without norms, in FP32."""
    return _merged(*_rotated_back(dq, dk, freqs_MD), dv.float())


def merge_normed_heads(
    dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor | None, qkv: Tensor, norms: HeadNorms
) -> tuple[Tensor, HeadNormGradients]:
    """Return the gradient of the qkv rows [M, O] of `split_heads` in FP32, and those of the norms' weights."""
    (groups, dim), rows = dk.shape[1:], qkv.float()
    heads = rows.view(len(qkv), groups, -1, dim)
    q, k = heads[:, :, :-2].flatten(1, 2), heads[:, :, -2]
    dq, dk = _rotated_back(dq, dk, freqs_MD)
    dq, dq_weight_D = _head_norm_backward(dq, q, norms.q_D, norms.eps)
    dk, dk_weight_D = _head_norm_backward(dk, k, norms.k_D, norms.eps)
    return _merged(dq, dk, dv.float()), HeadNormGradients(dq_weight_D, dk_weight_D)


def _rotated_back(dq: Tensor, dk: Tensor, freqs_MD: Tensor | None) -> tuple[Tensor, Tensor]:
    dq, dk = dq.float(), dk.float()
    if freqs_MD is None:
        return dq, dk
    cos_MD, sin_MD = freqs_MD.cos(), -freqs_MD.sin()
    return rotate(dq, cos_MD, sin_MD), rotate(dk, cos_MD, sin_MD)


def _merged(dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    groups = dk.shape[1]
    return torch.cat([x.unflatten(1, (groups, -1)) for x in (dq, dk, dv)], dim=2).flatten(1)


def _rstd(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _head_norm_backward(grad: Tensor, x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of a norm's input [M, heads, D] and of its weight [D], both in FP32."""
    rstd = _rstd(x, eps)
    unit = x * rstd
    weight_grad_D = (grad * unit).sum((0, 1))
    grad = grad * weight_D.float()
    return rstd * (grad - unit * (grad * unit).mean(-1, keepdim=True)), weight_grad_D
