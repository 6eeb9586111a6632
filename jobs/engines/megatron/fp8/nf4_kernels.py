"""Dequantises NF4 in Triton: reads 4.127 bits a weight, writes BF16."""

import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.fp8.nf4 import BLOCK, GROUP, Nf4, dynamic_map, nf4_levels

_BLOCK, _GROUP = tl.constexpr(BLOCK), tl.constexpr(GROUP)
_BLOCKS = 64
"""Of a weight, a program."""


def dequantize(weight: Nf4, out: Tensor) -> Tensor:
    """Write the weight, of as many numbers as `out` has, into `out`; return it."""
    num_blocks, device = weight.absmax.numel(), out.device
    tables = nf4_levels(device), dynamic_map(device)
    # Without fusion to FMA the bits are those of torch.
    options = {"BLOCKS": _BLOCKS, "num_warps": 4, "enable_fp_fusion": False}
    _dequantize[(triton.cdiv(num_blocks, _BLOCKS),)](*weight, *tables, out, num_blocks, **options)
    return out


@triton.jit
def _dequantize(
    codes_ptr, absmax_ptr, scales_ptr, offset_ptr, levels_ptr, map_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    is_block = block < num_blocks
    absmax = tl.load(map_ptr + tl.load(absmax_ptr + block, is_block, other=0).to(tl.int32))
    absmax = absmax * tl.load(scales_ptr + block // _GROUP, is_block, other=0.0) + tl.load(offset_ptr)
    byte, column = tl.arange(0, _BLOCK // 2), tl.arange(0, _BLOCK)
    at = codes_ptr + block[:, None] * (_BLOCK // 2) + byte[None, :]
    pair = tl.load(at, is_block[:, None], other=0).to(tl.int32)
    first = tl.load(levels_ptr + (pair >> 4)) * absmax[:, None]
    second = tl.load(levels_ptr + (pair & 15)) * absmax[:, None]
    values = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + block[:, None] * _BLOCK + column[None, :], values, is_block[:, None])
