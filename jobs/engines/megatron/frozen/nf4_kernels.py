"""NF4 dequantisation in Triton: reads 4.127 bits per weight, writes BF16.

It uses few large programs, to leave most multiprocessors to the GEMM that runs at the same time.
"""

import triton
import triton.language as tl
from torch import Tensor

from jobs.weights.nf4 import BLOCK, GROUP, Nf4, dynamic_map, nf4_levels

_BLOCK, _GROUP = tl.constexpr(BLOCK), tl.constexpr(GROUP)
_BLOCKS = 256
"""Blocks of a weight that a program processes at once."""
PROGRAMS = 48
"""Number of programs; each occupies one multiprocessor."""


def dequantize(weight: Nf4, out: Tensor, *, programs: int | None = None) -> Tensor:
    """Write the weight into `out`, which has at least as many elements; return `out`."""
    num_blocks, device = weight.absmax.numel(), out.device
    tables = nf4_levels(device), dynamic_map(device)
    num_tiles = triton.cdiv(num_blocks, _BLOCKS)
    num_programs = min(programs or PROGRAMS, num_tiles)
    # Without FMA fusion the result is bitwise the same as torch's.
    options = {"TILES": triton.cdiv(num_tiles, num_programs), "num_warps": 16, "enable_fp_fusion": False}
    _dequantize[(num_programs,)](*weight, *tables, out, num_blocks, BLOCKS=_BLOCKS, **options)
    return out


@triton.jit
def _dequantize(
    codes_ptr, absmax_ptr, scales_ptr, offset_ptr, levels_ptr, map_ptr, out_ptr, num_blocks,
    BLOCKS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    byte, column = tl.arange(0, _BLOCK // 2), tl.arange(0, _BLOCK)
    for tile in range(TILES):
        block = (tl.program_id(0).to(tl.int64) + tile * tl.num_programs(0)) * BLOCKS + tl.arange(0, BLOCKS)
        is_block = block < num_blocks
        absmax = tl.load(map_ptr + tl.load(absmax_ptr + block, is_block, other=0).to(tl.int32))
        absmax = absmax * tl.load(scales_ptr + block // _GROUP, is_block, other=0.0) + tl.load(offset_ptr)
        at = codes_ptr + block[:, None] * (_BLOCK // 2) + byte[None, :]
        pair = tl.load(at, is_block[:, None], other=0).to(tl.int32)
        first = tl.load(levels_ptr + (pair >> 4)) * absmax[:, None]
        second = tl.load(levels_ptr + (pair & 15)) * absmax[:, None]
        values = tl.interleave(first, second).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + block[:, None] * _BLOCK + column[None, :], values, is_block[:, None])
