"""The layer's operations in plain torch: what a CPU runs, and what the kernels are compared with.

Shape letters: M rows (tokens), H hidden, F width of the MLP, D head dimension, G query groups, R queries of a group.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from jobs.engines.megatron.fp8.quantize import BF16, FP8, LARGEST, SMALLEST_AMAX, Adapted, Dropout, Lora, Quantized


def quantize(x_MH: Tensor) -> Quantized:
    """Return the rows in FP8, each with a scale of its own."""
    x_MH = x_MH.float()
    scale_M = x_MH.abs().amax(1).clamp(min=SMALLEST_AMAX) / LARGEST
    return Quantized((x_MH / scale_M[:, None]).to(FP8), scale_M)


def dequantize(x: Quantized) -> Tensor:
    """Return the numbers in FP32."""
    return x.values.float() * x.scale[:, None]


def matmul(x: Quantized, weight: Quantized) -> Tensor:
    """Return x weight^T [M, N] in BF16, for a weight [N, K]; products are summed in FP32."""
    return (x.values.float() @ weight.values.float().T * (x.scale[:, None] * weight.scale[0])).to(BF16)


def transpose(weight: Quantized) -> Quantized:
    """Return the weight [N, K] as [K, N], contiguous: what the product with its gradient needs."""
    return Quantized(weight.values.T.contiguous(), weight.scale)


def turned(linear: torch.nn.Module) -> Quantized:
    """Return a frozen FP8 linear's weight, transposed."""
    return transpose(linear.quantized)


def norm(x_MH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return RMSNorm in FP32 and 1 / rms [M]."""
    x_MH = x_MH.float()
    rstd_M = torch.rsqrt(x_MH.square().mean(1) + eps)
    return x_MH * rstd_M[:, None] * weight_H.float(), rstd_M


def norm_quantize(x_MH: Tensor, weight_H: Tensor, eps: float) -> tuple[Quantized, Tensor]:
    """Return norm(x) in FP8, and 1 / rms [M]."""
    normed_MH, rstd_M = norm(x_MH, weight_H, eps)
    return quantize(normed_MH), rstd_M


def add_norm_quantize(x_MH: Tensor, y_MH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Quantized, Tensor]:
    """Return x + y, its norm in FP8, and 1 / rms [M]."""
    sum_MH = x_MH + y_MH
    normed_MH, rstd_M = norm(sum_MH, weight_H, eps)
    return sum_MH, quantize(normed_MH), rstd_M


def norm_backward(
    grad_MH: Tensor,
    residual_MH: Tensor,
    normed: Quantized,
    rstd_M: Tensor,
    weight_H: Tensor,
    adapted: Adapted | None = None,
) -> Tensor:
    """Return residual + the gradient of the norm's input, from that of its output (and an adapter's) and the output itself."""
    grad_MH, weight_H = grad_MH.float(), weight_H.float()
    if adapted:
        grad_MH = grad_MH + _dropped(adapted.grad.float(), adapted.drop)
    grad_MH = grad_MH * weight_H
    unit_MH = torch.where(weight_H == 0, 0, dequantize(normed) / weight_H)  # x / rms
    along_M = (grad_MH * unit_MH).mean(1)
    grad_MH = rstd_M[:, None] * (grad_MH - unit_MH * along_M[:, None])
    return (residual_MH.float() + grad_MH).to(residual_MH.dtype)


def norm_backward_quantize(
    grad_MH: Tensor, residual_MH: Tensor, normed: Quantized, rstd_M: Tensor, weight_H: Tensor
) -> tuple[Tensor, Quantized]:
    """Return what `norm_backward` does, also in FP8."""
    grad_MH = norm_backward(grad_MH, residual_MH, normed, rstd_M, weight_H)
    return grad_MH, quantize(grad_MH)


def rope(qkv: Tensor, freqs_MD: Tensor, groups: int, lora: Lora | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [M, G*R, D], k and v [M, G, D], q and k turned, from rows that hold each group's queries, key and value.

    What an adapter adds to the rows is added before.
    """
    dim = freqs_MD.shape[-1]
    dtype, qkv = qkv.dtype, qkv.float()
    if lora:
        qkv = qkv + lora.scale * (lora.low.float() @ lora.b.float().T)
    qkv = qkv.view(len(qkv), groups, -1, dim)
    turned = _turn(qkv[:, :, :-1], freqs_MD.cos(), freqs_MD.sin()).to(dtype)
    return turned[:, :, :-1].flatten(1, 2), turned[:, :, -1].contiguous(), qkv[:, :, -1].to(dtype).contiguous()


def rope_backward(dq: Tensor, dk: Tensor, dv: Tensor, freqs_MD: Tensor) -> tuple[Tensor, Quantized]:
    """Return the gradient of `rope`'s rows, as it is and in FP8."""
    groups = dk.shape[1]
    turned = torch.cat([dq.unflatten(1, (groups, -1)), dk[:, :, None]], dim=2).float()
    back = _turn(turned, freqs_MD.cos(), -freqs_MD.sin()).to(dq.dtype)
    dqkv = torch.cat([back, dv[:, :, None]], dim=2).flatten(1)
    return dqkv, quantize(dqkv)


def swiglu_quantize(gate_up: Tensor, *, keep: bool = True) -> tuple[Quantized, Quantized | None]:
    """Return silu(gate) * up [M, F] in FP8, and gate and up [2 M, F] to keep: gates first, each row with its scale."""
    gate_MF, up_MF = gate_up.float().chunk(2, dim=1)
    return quantize(silu(gate_MF) * up_MF), quantize(torch.cat([gate_MF, up_MF])) if keep else None


def swiglu_backward_quantize(grad_MF: Tensor, kept: Quantized) -> Quantized:
    """Return the gradient of gate and up [M, 2 F] in FP8."""
    gate_MF, up_MF = dequantize(kept).chunk(2)
    grad_MF, sigmoid_MF = grad_MF.float(), gate_MF.sigmoid()
    dgate_MF = grad_MF * up_MF * sigmoid_MF * (1 + gate_MF * (1 - sigmoid_MF))
    return quantize(torch.cat([dgate_MF, grad_MF * gate_MF * sigmoid_MF], dim=1))


def down(x: Tensor | Quantized, a_RI: Tensor, drop: Dropout) -> Tensor:
    """Return dropout(x) A^T [M, R] in BF16."""
    return (_dropped(_plain(x), drop) @ a_RI.float().T).to(BF16)


def down_backward(low_grad_MR: Tensor, x: Tensor | Quantized, drop: Dropout) -> Tensor:
    """Return the gradient of A [R, I]."""
    return (low_grad_MR.float().T @ _dropped(_plain(x), drop)).to(BF16)


def add_down_gradient(grad_MI: Tensor, low_grad_MR: Tensor, a_RI: Tensor, drop: Dropout) -> Tensor:
    """Return the gradient with what an adapter's A adds to it, in its place."""
    return grad_MI.copy_(grad_MI.float() + _dropped(low_grad_MR.float() @ a_RI.float(), drop))


def _plain(x: Tensor | Quantized) -> Tensor:
    return dequantize(x) if isinstance(x, Quantized) else x.float()


def _dropped(x_MH: Tensor, drop: Dropout) -> Tensor:
    if not drop.threshold:
        return x_MH
    index = torch.arange(x_MH.numel(), device=x_MH.device).view_as(x_MH)
    bits = _hash(index // 2 ^ drop.seed)
    bits = torch.where(index % 2 == 0, bits & 0xFFFF, bits >> 16)
    return torch.where(bits >= drop.threshold, x_MH * drop.scale, 0)


def _hash(x: Tensor) -> Tensor:
    """Return 32 well-mixed bits. Source: Wellons, "Prospecting for Hash Functions", lowbias32."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16


def _turn(x: Tensor, cos_MD: Tensor, sin_MD: Tensor) -> Tensor:
    """Return heads [M, G, R, D] turned by the angles; a head's two halves are the coordinates of its planes."""
    low, high = x.chunk(2, dim=-1)
    return x * cos_MD[:, None, None] + torch.cat([-high, low], dim=-1) * sin_MD[:, None, None]
