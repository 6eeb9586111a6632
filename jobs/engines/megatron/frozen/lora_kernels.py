"""The GEMMs with an adapter's A in Triton. They apply dropout while loading and never write a full-width tensor for it.

Each program computes a tile with BF16 operands and FP32 sums. The row scales of an FP8 operand are applied to the sum
if they belong to its rows, otherwise to the other operand. Loop bounds are constants because Triton's interpreter needs
them; so a kernel is compiled for each size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.dropout_kernels import is_kept, jit_for_any_seed, mask_args
from jobs.engines.megatron.quantize import BF16, Dropout, Quantized
from jobs.engines.megatron.triton_target import FACTOR

_COLUMNS = 128
"""The width of a tile; half of it for large LoRA ranks, so that more programs fit on a multiprocessor."""
_PARTS, _PROGRAMS = 8, 1024
"""Split-K: a sum is split into up to _PARTS parts to get _PROGRAMS programs; torch adds the parts in a fixed order."""


def down(x: Tensor | Quantized, a: Tensor, drop: Dropout) -> Tensor:
    values, scale, of_x = _values_and_scale(x)
    (num_rows, width), rank = values.shape, len(a)
    num_tiles = triton.cdiv(num_rows, rows_of_tile(rank))
    num_parts = min(_PARTS, max(1, _PROGRAMS // num_tiles))
    parts = torch.empty(num_parts, num_rows, rank, dtype=torch.float32, device=a.device)
    grid = (num_tiles, num_parts)
    args = (values, scale, a, parts, *mask_args(drop), num_rows, rank, width, num_parts)
    _down[grid](*args, **of_x, **_tile(rank, drop))
    return parts.sum(0).to(BF16)


def down_backward(low_grad: Tensor, x: Tensor | Quantized, drop: Dropout) -> Tensor:
    values, scale, of_x = _values_and_scale(x)
    (num_rows, width), rank = values.shape, low_grad.shape[1]
    parts, tile = torch.empty(_PARTS, rank, width, dtype=torch.float32, device=low_grad.device), _tile(rank, drop)
    grid = (triton.cdiv(width, tile["COLUMNS"]), _PARTS)
    args = (low_grad.contiguous(), values, scale, parts, *mask_args(drop), width, rank, num_rows, _PARTS)
    _down_backward[grid](*args, **of_x, **tile)
    return parts.sum(0).to(BF16)


def add_down_gradient(grad: Tensor, low_grad: Tensor, a: Tensor, drop: Dropout) -> Tensor:
    (num_rows, width), rank = grad.shape, len(a)
    tile = _tile(rank, drop) | {"COLUMNS": _COLUMNS, "num_warps": 4 if rank <= 32 else 8}
    grid = (triton.cdiv(num_rows, rows_of_tile(rank)), triton.cdiv(width, _COLUMNS))
    args = (grad, low_grad.contiguous(), a, *mask_args(drop), num_rows, width, rank)
    _add_down_gradient[grid](*args, **tile)
    return grad


def _values_and_scale(x: Tensor | Quantized) -> tuple[Tensor, Tensor, dict[str, bool]]:
    """Return x, its scale (without one, any tensor) and the kernels' options."""
    values, scale = x if isinstance(x, Quantized) else (x, None)
    return values, values if scale is None else scale, {"SCALED": scale is not None}


def _tile(rank: int, drop: Dropout) -> dict[str, int]:
    shape = {"ROWS": rows_of_tile(rank), "COLUMNS": _COLUMNS if rank <= 32 else _COLUMNS // 2, "RANK": padded(rank)}
    return shape | {"DROP": drop.threshold > 0, "num_warps": 4, "num_stages": 4}


def rows_of_tile(rank: int) -> int:
    """Return the height of a tile: each program reads A, which must not take longer than reading x."""
    return 32 if rank <= 32 else 64


def padded(rank: int) -> int:
    """Return the LoRA rank padded to a size that tensor cores support."""
    return max(16, triton.next_power_of_2(rank)) if rank else 0


@triton.jit
def _load_with_dropout(x_ptr, row, column, num_rows, width, seed, threshold, DROP: tl.constexpr):
    """Return a tile in BF16 after dropout, not yet scaled by 1 / (1 - p)."""
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    x = tl.load(x_ptr + row[:, None] * width + column[None, :], inside, other=0.0).to(FACTOR)
    if DROP:
        x = tl.where(is_kept(row[:, None], column[None, :], width, seed, threshold), x, 0.0)
    return x


@jit_for_any_seed
def _down(
    x_ptr, scale_ptr, a_ptr, parts_ptr, seed, threshold, dropout_scale, num_rows, rank,
    width: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part, r = tl.program_id(1).to(tl.int64), tl.arange(0, RANK)
    total = tl.zeros([ROWS, RANK], tl.float32)
    for start in range(0, width, PARTS * COLUMNS):
        column = start + part * COLUMNS + tl.arange(0, COLUMNS)
        x = _load_with_dropout(x_ptr, row, column, num_rows, width, seed, threshold, DROP)
        inside = (column < width)[:, None] & (r < rank)[None, :]
        a = tl.load(a_ptr + r[None, :] * width + column[:, None], inside, other=0.0)
        total = tl.dot(x, a.to(FACTOR), total)
    total *= dropout_scale
    if SCALED:
        total *= tl.load(scale_ptr + row, row < num_rows, other=0.0)[:, None]
    at = (part * num_rows + row)[:, None] * rank + r[None, :]
    tl.store(parts_ptr + at, total, (row < num_rows)[:, None] & (r < rank)[None, :])


@jit_for_any_seed
def _down_backward(
    low_grad_ptr, x_ptr, scale_ptr, parts_ptr, seed, threshold, dropout_scale, width, rank,
    num_rows: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr,
    DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    part, r = tl.program_id(1).to(tl.int64), tl.arange(0, RANK)
    total = tl.zeros([RANK, COLUMNS], tl.float32)
    for start in range(0, num_rows, PARTS * ROWS):
        row = start + part * ROWS + tl.arange(0, ROWS)
        x = _load_with_dropout(x_ptr, row, column, num_rows, width, seed, threshold, DROP)
        inside = (r < rank)[:, None] & (row < num_rows)[None, :]
        low_grad = tl.load(low_grad_ptr + row[None, :] * rank + r[:, None], inside, other=0.0)
        if SCALED:
            low_grad = low_grad.to(tl.float32) * tl.load(scale_ptr + row, row < num_rows, other=0.0)[None, :]
        total = tl.dot(low_grad.to(FACTOR), x, total)
    at = (part * rank + r)[:, None] * width + column[None, :]
    tl.store(parts_ptr + at, total * dropout_scale, (r < rank)[:, None] & (column < width)[None, :])


@jit_for_any_seed
def _add_down_gradient(
    grad_ptr, low_grad_ptr, a_ptr, seed, threshold, dropout_scale, num_rows, width, rank,
    DROP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column, r = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANK)
    is_row, is_column, is_rank = row < num_rows, column < width, r < rank
    low_grad = tl.load(low_grad_ptr + row[:, None] * rank + r[None, :], is_row[:, None] & is_rank[None, :], other=0.0)
    a = tl.load(a_ptr + r[:, None] * width + column[None, :], is_rank[:, None] & is_column[None, :], other=0.0)
    more = tl.dot(low_grad.to(FACTOR), a.to(FACTOR)) * dropout_scale
    if DROP:
        more = tl.where(is_kept(row[:, None], column[None, :], width, seed, threshold), more, 0.0)
    at, inside = grad_ptr + row[:, None] * width + column[None, :], is_row[:, None] & is_column[None, :]
    tl.store(at, (tl.load(at, inside, other=0.0).to(tl.float32) + more).to(grad_ptr.dtype.element_ty), inside)
