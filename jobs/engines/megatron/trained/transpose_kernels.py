"""The operands of weight gradients in FP8, in Triton: tokens last, as Hopper's FP8 GEMMs need the summed dimension.

A sum over rows cannot have a scale for each row. The rows are therefore given one common scale, the largest of theirs,
and rounded again. Scales that are powers of two make that exact, except for the numbers that become subnormal.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.fp8.quantize import FP8
from jobs.engines.megatron.trained.ops import Operand

_TILE = 128
_MULTIPLE = 16
"""cuBLASLt wants rows of a multiple of 16 bytes; zeros are added to the sum."""


def tokens_last(x: Operand) -> Operand:
    """Return FP8 rows [M, I] as [I, M padded to 16 tokens] with one scale [1]."""
    assert x.scale is not None
    num_rows, width = x.values.shape
    length = triton.cdiv(num_rows, _MULTIPLE) * _MULTIPLE
    out = torch.empty(width, length, dtype=FP8, device=x.values.device)
    largest = x.scale.amax(0, keepdim=True)
    grid = (triton.cdiv(num_rows, _TILE), triton.cdiv(width, _TILE))
    _tokens_last[grid](x.values, x.scale, largest, out, num_rows, width, length, TILE=_TILE, num_warps=8)
    return Operand(out, largest)


@triton.jit
def _tokens_last(in_ptr, scale_ptr, largest_ptr, out_ptr, num_rows, width, length, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    tile = tl.load(in_ptr + row[:, None] * width + column[None, :], inside, other=0.0).to(tl.float32)
    ratio = tl.load(scale_ptr + row, row < num_rows, other=0.0) / tl.load(largest_ptr)
    tile = tl.trans((tile * ratio[:, None]).to(out_ptr.dtype.element_ty))
    tl.store(
        out_ptr + column[:, None] * length + row[None, :], tile, (column < width)[:, None] & (row < length)[None, :]
    )


def quantize_tensor(x: Tensor, scale: Tensor, out: Tensor) -> None:
    """Write a contiguous tensor in FP8 with one scale [1] into `out`."""
    _quantize_tensor[(triton.cdiv(x.numel(), _BLOCK),)](x, scale, out, x.numel(), BLOCK=_BLOCK, num_warps=8)


_BLOCK = 8192


@triton.jit
def _quantize_tensor(x_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x / tl.load(scale_ptr)).to(out_ptr.dtype.element_ty), at < size)
