"""Linears of a few rows (2 to 64) in Triton: the weights are the wide operand of the tensor cores, and are read once.

RMSNorm is a separate kernel that runs first. A program multiplies some outputs by a part of the inputs (split_fp8-K),
so that small linears also occupy the full GPU; the program that finishes last adds the parts in order, and applies
SwiGLU and the residual. FP8 weights are multiplied without conversion: each value of a row x is written as two FP8
values, x = scale * (high + low / 16), which together are as accurate as one BF16 value.

Shape letters: M rows, I and O input and output of a linear; in comments, of a tile.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jobs.engines.megatron.generation.one_row_kernels import WeightOperands, launch_options, weights_tile
from jobs.engines.megatron.quantize import FP8, LARGEST, SMALLEST_AMAX
from jobs.engines.megatron.trained.ops import NormWeights
from jobs.engines.megatron.triton_target import FACTOR, HAS_PTX
from jobs.weights.nf4 import nf4_levels

MOST_ROWS = 64
_FP8_FACTOR = tl.constexpr(tl.float8e4nv if HAS_PTX.value else tl.float32)
_LARGEST, _SMALLEST_AMAX = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_AMAX)
LOW = 16.0
"""The factor of the second FP8 value: the first one has 4 significant bits."""
_LOW = tl.constexpr(LOW)
_PROGRAMS, _MOST_PARTS = 264, 8
"""Target number of programs (two per multiprocessor of an H100 or H200), and maximum number of split_fp8-K parts."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The inputs of a tile, and the number of pipeline stages."""

    inputs: int
    stages: int


_OUTPUTS, _NUM_WARPS = 64, 4
"""Outputs per program: the minimum of Hopper's tensor core instruction (wgmma). With SwiGLU a program computes this
many gates and as many ups."""
TILES = {
    (torch.bfloat16, False): Tile(128, 4),
    (torch.bfloat16, True): Tile(64, 4),
    (FP8, False): Tile(128, 5),
    (FP8, True): Tile(128, 4),
    (torch.uint8, False): Tile(128, 1),
    (torch.uint8, True): Tile(128, 1),
}
"""By the data type of the weights and whether they are gates and ups: the fastest of 36 for 31 rows on an H200, or
within 3 % of it (docs/results/2026-11-23-generation.md). Tiles for 4-bit weights were not tuned."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [M, I] as operand of a GEMM: in BF16, or scale * (high + low / 16) in FP8."""

    high: Tensor
    low: Tensor | None = None
    scale: Tensor | None = None
    """[M], in FP32."""


def multiply(
    x: Tensor, weights: WeightOperands, *, norm: NormWeights | None, residual: Tensor | None, out: Tensor
) -> Tensor:
    """Fill `out` [M, O] with the products of x [M, I], and return it."""
    return _multiply(_rows(x, weights[0].dtype, norm), weights, residual, out)


def _rows(x: Tensor, dtype: torch.dtype, norm: NormWeights | None) -> Rows:
    """Return the rows as operand for weights of this data type."""
    if dtype is FP8:
        numbers, scale = split_fp8(x, norm)
        high, low = numbers
        return Rows(high, low, scale)
    if norm is None:
        return Rows(x)
    high = torch.empty_like(x)
    _prepare(x, norm, high)
    return Rows(high)


def split_fp8(x: Tensor, norm: NormWeights | None) -> tuple[Tensor, Tensor]:
    """Return both FP8 values [2, M, I] of rows x [M, I], and the scale of each row [M]."""
    numbers, scale = torch.empty(2, *x.shape, dtype=FP8, device=x.device), x.new_empty(len(x), dtype=torch.float32)
    high, low = numbers
    _prepare(x, norm, high, low, scale)
    return numbers, scale


def _prepare(
    x: Tensor, norm: NormWeights | None, high: Tensor, low: Tensor | None = None, scale: Tensor | None = None
) -> None:
    norm_weight, eps = (norm.weight_H, norm.eps) if norm else (None, 0.0)
    size = triton.next_power_of_2(x.shape[1])
    options = {"WIDTH": x.shape[1], "SIZE": size, "num_warps": min(32, max(4, size // 512))} | launch_options()
    _rows_kernel[(len(x),)](x, norm_weight, high, low, scale, eps, **options)


def _multiply(rows: Rows, weights: WeightOperands, residual: Tensor | None, out: Tensor) -> Tensor:
    (num_rows, num_outputs), width, is_gated = out.shape, rows.high.shape[1], weights[2] is not None
    tile, num_tiles = TILES[weights[0].dtype, is_gated], triton.cdiv(num_outputs, _OUTPUTS)
    num_steps = triton.cdiv(width, tile.inputs)
    parts = max(1, min(_MOST_PARTS, _PROGRAMS // num_tiles, num_steps))
    row_size, kinds = max(16, triton.next_power_of_2(num_rows)), 1 + is_gated
    sums = torch.empty(num_tiles * parts * kinds * _OUTPUTS * row_size, dtype=torch.float32, device=out.device)
    options = {"OUTPUTS": _OUTPUTS, "INPUTS": tile.inputs, "ROWS": row_size, "WIDTH": width, "PARTS": parts}
    options |= {"STEPS": triton.cdiv(num_steps, parts), "STAGES": tile.stages, "num_warps": _NUM_WARPS}
    options |= launch_options()
    tensors = (rows.high, rows.low, rows.scale, *weights, nf4_levels(out.device), residual, out, sums)
    _product_kernel[(num_tiles, parts)](*tensors, _counters(out.device), num_rows, num_outputs, **options)
    return out


@cache
def _counters(device: torch.device) -> Tensor:
    """Return counters of finished parts per tile; the last program resets them to 0. All linears share them."""
    return torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)


@triton.jit
def _rows_kernel(
    x_ptr, norm_ptr, high_ptr, low_ptr, scale_ptr, eps, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, SIZE)
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    at, inside = row * WIDTH + column, column < WIDTH
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
        x *= tl.load(norm_ptr + column, inside, other=0.0).to(tl.float32)
    if low_ptr is not None:
        scale = tl.maximum(tl.max(tl.abs(x), 0), _SMALLEST_AMAX) / _LARGEST
        x /= scale
        high = x.to(tl.float8e4nv)
        tl.store(high_ptr + at, high, inside)
        tl.store(low_ptr + at, ((x - high.to(tl.float32)) * _LOW).to(tl.float8e4nv), inside)
        tl.store(scale_ptr + row, scale)
    else:
        tl.store(high_ptr + at, x.to(high_ptr.dtype.element_ty), inside)


@triton.jit
def _x_tile(ptr, row, column, num_rows, WIDTH: tl.constexpr):
    """Return inputs of the rows [I, M]."""
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(ptr + row[:, None] * WIDTH + column[None, :], inside, other=0.0)
    return tl.trans(x.to(_FP8_FACTOR if ptr.dtype.element_ty == tl.float8e4nv else FACTOR))


@triton.jit
def _added(
    sums, low_sums, values_ptr, scale_ptr, levels_ptr, output, begin, num_outputs, high, low,
    WIDTH: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return the sums [O, M] after adding the products of a tile of weights."""
    DTYPE: tl.constexpr = _FP8_FACTOR if values_ptr.dtype.element_ty == tl.float8e4nv else FACTOR
    weights = weights_tile(values_ptr, scale_ptr, levels_ptr, output, begin, num_outputs, WIDTH, INPUTS, DTYPE)
    sums = tl.dot(weights, high, sums)
    if low is not None:
        low_sums = tl.dot(weights, low, low_sums)
    return sums, low_sums


@triton.jit
def _is_last(sums, up_sums, up_ptr, sums_ptr, done_ptr, tile, part, at, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Store the sums of a part, at a stride of SIZE, and return whether this program finished last."""
    tl.store(sums_ptr + part * SIZE + at, sums)
    if up_ptr is not None:
        tl.store(sums_ptr + (PARTS + part) * SIZE + at, up_sums)
    tl.debug_barrier()
    is_last = tl.atomic_add(done_ptr + tile, 1) == PARTS - 1
    if is_last:
        tl.store(done_ptr + tile, 0)
    return is_last


@triton.jit
def _merged(sums, sums_ptr, at, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """Return the sums of all parts."""
    total = tl.zeros_like(sums)
    for other in tl.static_range(PARTS):
        total += tl.load(sums_ptr + other * SIZE + at, cache_modifier=".cg")
    return total


@triton.jit
def _scaled(sums, values_ptr, scale_ptr, x_scale_ptr, output, num_outputs, row, num_rows):
    if values_ptr.dtype.element_ty == tl.float8e4nv:
        x_scale = tl.load(x_scale_ptr + row, row < num_rows, other=0.0)[None, :]
        sums *= tl.load(scale_ptr + output, output < num_outputs, other=0.0)[:, None] * x_scale
    return sums


@triton.jit
def _store(
    sums, up_sums, values_ptr, scale_ptr, up_ptr, up_scale_ptr, x_scale_ptr, residual_ptr, out_ptr, output, num_outputs,
    row, num_rows,
):  # fmt: skip
    y = _scaled(sums, values_ptr, scale_ptr, x_scale_ptr, output, num_outputs, row, num_rows)
    if up_ptr is not None:
        y *= tl.sigmoid(y) * _scaled(up_sums, up_ptr, up_scale_ptr, x_scale_ptr, output, num_outputs, row, num_rows)
    at = row[None, :] * num_outputs + output[:, None]
    inside = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y, inside)


@triton.jit
def _sums(
    x_ptr, low_ptr, values_ptr, scale_ptr, up_ptr, up_scale_ptr, levels_ptr, first, output, num_outputs, row, num_rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Return the sums [O, M] of gates (or of all outputs) and of ups, starting at the input `first`."""
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    low_sums, up_sums, up_low_sums = sums, sums, sums
    for step in tl.range(0, STEPS, num_stages=STAGES):
        begin = first + step * INPUTS
        column = begin + tl.arange(0, INPUTS)
        high = _x_tile(x_ptr, row, column, num_rows, WIDTH)
        low = None if low_ptr is None else _x_tile(low_ptr, row, column, num_rows, WIDTH)
        sums, low_sums = _added(
            sums, low_sums, values_ptr, scale_ptr, levels_ptr, output, begin, num_outputs, high, low, WIDTH, INPUTS
        )
        if up_ptr is not None:
            up_sums, up_low_sums = _added(
                up_sums, up_low_sums, up_ptr, up_scale_ptr, levels_ptr, output, begin, num_outputs, high, low, WIDTH,
                INPUTS,
            )  # fmt: skip
    if low_ptr is not None:
        sums += low_sums / _LOW
        up_sums += up_low_sums / _LOW
    return sums, up_sums


@triton.jit
def _product_kernel(
    x_ptr, low_ptr, x_scale_ptr, values_ptr, scale_ptr, up_ptr, up_scale_ptr, levels_ptr, residual_ptr, out_ptr,
    sums_ptr, done_ptr, num_rows, num_outputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    output, row = tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    if OVERLAPPED:
        gdc_wait()
    sums, up_sums = _sums(
        x_ptr, low_ptr, values_ptr, scale_ptr, up_ptr, up_scale_ptr, levels_ptr, part * STEPS * INPUTS, output,
        num_outputs, row, num_rows, OUTPUTS, INPUTS, ROWS, WIDTH, STEPS, STAGES,
    )  # fmt: skip
    if OVERLAPPED:
        gdc_launch_dependents()
    SIZE: tl.constexpr = OUTPUTS * ROWS
    KINDS: tl.constexpr = 1 if up_ptr is None else 2
    at, all_ptr = tl.arange(0, OUTPUTS)[:, None] * ROWS + row[None, :], sums_ptr + tile * (PARTS * KINDS * SIZE)
    is_last = PARTS == 1
    if PARTS > 1:
        is_last = _is_last(sums, up_sums, up_ptr, all_ptr, done_ptr, tile, part, at, PARTS, SIZE)
    if is_last:
        if PARTS > 1:
            sums = _merged(sums, all_ptr, at, PARTS, SIZE)
            if up_ptr is not None:
                up_sums = _merged(up_sums, all_ptr + PARTS * SIZE, at, PARTS, SIZE)
        _store(
            sums, up_sums, values_ptr, scale_ptr, up_ptr, up_scale_ptr, x_scale_ptr, residual_ptr, out_ptr, output,
            num_outputs, row, num_rows,
        )  # fmt: skip
