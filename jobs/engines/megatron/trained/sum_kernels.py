"""Sums over rows in Triton, for the gradients of biases.

A program sums some columns over a part of the rows, and torch adds up the parts in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.trained.ops import Operand

_ROWS, _COLUMNS = 32, 256
"""The size of a tile."""
_PARTS = 32


def column_sum(x: Tensor | Operand) -> Tensor:
    """Return the sum over rows in FP32."""
    values, scale = x if isinstance(x, Operand) else (x, None)
    num_rows, width = values.shape
    tiles = triton.cdiv(num_rows, _PARTS * _ROWS)
    parts = torch.empty(_PARTS, width, dtype=torch.float32, device=values.device)
    grid, tile = (triton.cdiv(width, _COLUMNS), _PARTS), {"ROWS": _ROWS, "COLUMNS": _COLUMNS}
    _column_sum[grid](values, scale, parts, num_rows, width, TILES=tiles, **tile, num_warps=8)
    return parts.sum(0)


@triton.jit
def _column_sum(
    x_ptr, scale_ptr, parts_ptr, num_rows, width, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column, part = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.program_id(1).to(tl.int64)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(TILES):
        row = (part * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < num_rows)[:, None] & (column < width)[None, :]
        x = tl.load(x_ptr + row[:, None] * width + column[None, :], inside, other=0.0).to(tl.float32)
        if scale_ptr is not None:
            x *= tl.load(scale_ptr + row, row < num_rows, other=0.0)[:, None]
        total += x
    tl.store(parts_ptr + part * width + column, tl.sum(total, 0), column < width)
