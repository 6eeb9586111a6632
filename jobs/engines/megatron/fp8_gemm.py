"""GEMMs with row-quantised FP8 (E4M3) operands, and the transposes that they need."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.quantize import BF16, FP8, Quantized


def matmul(x: Quantized, weight: Quantized) -> Tensor:
    """Return x weight^T, computed by cuBLAS. Hopper's FP8 GEMMs need the reduction dimension last in both operands."""
    assert x.scale is not None and weight.scale is not None
    num_out, num_scales = len(weight.values), weight.scale.numel()
    scale_N = weight.scale[:num_out] if num_scales >= num_out else weight.scale[:1].expand(num_out).contiguous()
    return torch._scaled_mm(
        x.values,
        weight.values.T,
        scale_a=x.scale[:, None],
        scale_b=scale_N[None],
        out_dtype=BF16,
        use_fast_accum=True,
    )


def transpose(weight: Quantized, out: Tensor | None = None) -> Quantized:
    num_rows, num_columns = weight.values.shape
    if out is None:
        out = torch.empty(num_columns * num_rows, dtype=torch.uint8, device=weight.values.device)
    grid = (triton.cdiv(num_rows, 128), triton.cdiv(num_columns, 128))
    _transpose[grid](weight.values.view(torch.uint8), out, num_rows, num_columns, num_warps=8)
    return Quantized(out[: num_columns * num_rows].view(num_columns, num_rows).view(FP8), weight.scale)


@triton.jit
def _transpose(in_ptr, out_ptr, num_rows, num_columns):
    row = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    column = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tile = tl.load(in_ptr + row[:, None] * num_columns + column[None, :], inside)
    tl.store(out_ptr + column[:, None] * num_rows + row[None, :], tl.trans(tile), tl.trans(inside))
