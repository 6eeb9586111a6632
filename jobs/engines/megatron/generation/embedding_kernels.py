"""The rows of a TP rank's part of the embedding, in one Triton kernel: torch needs seven."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def own_rows(tokens_M: Tensor, table_VH: Tensor, first: int) -> Tensor:
    """Return the rows [M, H] of tokens; 0 for those outside the table, whose first row is of the token `first`."""
    num_rows, width = table_VH.shape
    out_MH = torch.empty(len(tokens_M), width, dtype=table_VH.dtype, device=table_VH.device)
    size = triton.next_power_of_2(width)
    _own_rows[(len(tokens_M),)](tokens_M, table_VH, out_MH, first, num_rows, WIDTH=width, SIZE=size)
    return out_MH


@triton.jit
def _own_rows(tokens_ptr, table_ptr, out_ptr, first, num_rows, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, SIZE)
    token = tl.load(tokens_ptr + row) - first
    inside = column < WIDTH
    is_own = (token >= 0) & (token < num_rows)
    values = tl.load(table_ptr + token * WIDTH + column, inside & is_own, other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * WIDTH + column, values, inside)
