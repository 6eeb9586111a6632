"""RMSNorm, LayerNorm and GELU in Triton, forward and backward, for the layer that trains all weights.

A forward program computes one row in FP32. A backward program computes many rows one after another and sums the
gradients of weight and bias over them; torch then adds the partial sums of all programs in a fixed order. Results are
in BF16, or in FP8 with one scale per row. A result that is also stored in BF16 is rounded to BF16 before it is
quantised, so that both copies hold the same values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.quantize import BF16, FP8, Quantized
from jobs.engines.megatron.row_kernels import scale_of
from jobs.engines.megatron.trained.ops import NormGradients, NormStats, NormWeights, Operand
from jobs.engines.megatron.triton_target import num_multiprocessors


def empty_operand(num_rows: int, width: int, device: torch.device, to_fp8: bool) -> Operand:
    """Return uninitialised rows for a kernel's output: in FP8 with one scale per row, or in BF16."""
    if not to_fp8:
        return Operand(torch.empty(num_rows, width, dtype=BF16, device=device))
    values = torch.empty(num_rows, width, dtype=FP8, device=device)
    return Operand(values, torch.empty(num_rows, dtype=torch.float32, device=device))


_ROWS, _COLUMNS = 32, 256
"""The size of a tile."""
_PARTS = 32


def column_sum(x: Tensor | Operand) -> Tensor:
    """Return the sum over rows in FP32."""
    values, scale = x if isinstance(x, Quantized) else (x, None)
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


def norm(x: Tensor, weights: NormWeights, *, to_fp8: bool) -> tuple[Operand, NormStats]:
    num_rows, width = x.shape
    out, stats = empty_operand(num_rows, width, x.device, to_fp8), _empty_stats(x, weights)
    _launch_norm(x, None, None, None, out, stats, weights, AGAIN=False)
    return out, stats


def add_norm(
    x: Tensor, y: Tensor, bias: Tensor | None, weights: NormWeights, *, to_fp8: bool
) -> tuple[Tensor, Operand, NormStats]:
    num_rows, width = x.shape
    out, stats = empty_operand(num_rows, width, x.device, to_fp8), _empty_stats(x, weights)
    total = torch.empty_like(x)
    _launch_norm(x, y, bias, total, out, stats, weights, AGAIN=False)
    return total, out, stats


def recompute_norm(x: Tensor, stats: NormStats, weights: NormWeights, *, to_fp8: bool) -> Operand:
    num_rows, width = x.shape
    out = empty_operand(num_rows, width, x.device, to_fp8)
    _launch_norm(x, None, None, None, out, stats, weights, AGAIN=True)
    return out


def norm_backward(
    grad: Tensor, residual: Tensor, x: Tensor, stats: NormStats, weights: NormWeights, *, to_fp8: bool
) -> tuple[Tensor, Operand, NormGradients]:
    num_rows, width = x.shape
    dx = torch.empty_like(x)
    out = empty_operand(num_rows, width, x.device, to_fp8) if to_fp8 else Operand(dx)
    block = triton.next_power_of_2(width)
    num_warps = min(32, max(1, block // 256))
    rows = triton.cdiv(num_rows, num_multiprocessors(x.device) * 32 // num_warps)
    programs = triton.cdiv(num_rows, rows)
    parts = torch.empty(1 if weights.bias_H is None else 2, programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        grad, residual, x, *stats, weights.weight_H, dx, *(out if to_fp8 else (None, None)), parts, num_rows, width,
        ROWS=rows, BLOCK=block, num_warps=num_warps, maxnreg=64,
    )  # fmt: skip
    sums = parts.sum(1)
    return dx, out, NormGradients(sums[0], None if weights.bias_H is None else sums[1])


def _launch_norm(
    x: Tensor,
    y: Tensor | None,
    y_bias: Tensor | None,
    total: Tensor | None,
    out: Operand,
    stats: NormStats,
    weights: NormWeights,
    **options: bool,
) -> None:
    block = triton.next_power_of_2(x.shape[1])
    _norm[(len(x),)](
        x, y, y_bias, weights.weight_H, weights.bias_H, total, *out, *stats, weights.eps, x.shape[1],
        **options, BLOCK=block, num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip


def _empty_stats(x: Tensor, weights: NormWeights) -> NormStats:
    rstd, mean = torch.empty(2, len(x), dtype=torch.float32, device=x.device)
    return NormStats(rstd, None if weights.bias_H is None else mean)


@triton.jit
def _store(values_ptr, scale_ptr, row, at, inside, x):
    """Store a row; in FP8 if there is a pointer for its scale."""
    if scale_ptr is not None:
        scale = scale_of(tl.max(tl.abs(x), 0), POWERS=True)
        tl.store(scale_ptr + row, scale)
        x = x / scale
    tl.store(values_ptr + at, x.to(values_ptr.dtype.element_ty), inside)


@triton.jit
def _norm(
    x_ptr, y_ptr, y_bias_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr, scale_ptr, rstd_ptr, mean_ptr, eps, width,
    AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    if y_ptr is not None:
        x += tl.load(y_ptr + at, inside, other=0.0).to(tl.float32)
        if y_bias_ptr is not None:
            x += tl.load(y_bias_ptr + column, inside, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, x, inside)
        x = x.to(tl.float32)
    if mean_ptr is not None:
        if AGAIN:
            mean = tl.load(mean_ptr + row)
        else:
            mean = tl.sum(x, 0) / width
            tl.store(mean_ptr + row, mean)
        x = tl.where(inside, x - mean, 0.0)
    if AGAIN:
        rstd = tl.load(rstd_ptr + row)
    else:
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
        tl.store(rstd_ptr + row, rstd)
    out = x * rstd * tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column, inside, other=0.0).to(tl.float32)
    _store(out_ptr, scale_ptr, row, at, inside, out)


@triton.jit
def _norm_backward(
    grad_ptr, residual_ptr, x_ptr, rstd_ptr, mean_ptr, weight_ptr, dx_ptr, out_ptr, scale_ptr, parts_ptr,
    num_rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs, column = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, column < width, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK], tl.float32)
    bias_grad = weight_grad
    for i in tl.range(0, ROWS, num_stages=2):
        row = program + i * programs
        is_row = row < num_rows
        inside, at = is_row & (column < width), row * width + column
        grad = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
        out = tl.load(residual_ptr + at, inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, is_row, other=0.0)
        if mean_ptr is not None:
            x -= tl.load(mean_ptr + row, is_row, other=0.0)
            bias_grad += grad
        unit = x * rstd
        weight_grad += grad * unit
        grad *= weight
        along = unit * (tl.sum(grad * unit, 0) / width)
        if mean_ptr is not None:
            along += tl.sum(grad, 0) / width
        out = (out + rstd * (grad - along)).to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + at, out, inside)
        if scale_ptr is not None:
            out = out.to(tl.float32)
            scale = scale_of(tl.max(tl.abs(out), 0), POWERS=True)
            tl.store(scale_ptr + row, scale, is_row)
            tl.store(out_ptr + at, (out / scale).to(out_ptr.dtype.element_ty), inside)
    at = program * width + column
    tl.store(parts_ptr + at, weight_grad, column < width)
    if mean_ptr is not None:
        tl.store(parts_ptr + tl.num_programs(0).to(tl.int64) * width + at, bias_grad, column < width)


_CHUNK = 4096
"""Columns of a row that are processed at once."""
_LOWEST = tl.constexpr(0.17)
_STEEPEST = tl.constexpr(1.13)
_AGAIN = tl.constexpr("evict_last")
_ONCE = tl.constexpr("evict_first")
"""L2 policies: the second pass over a row reads the same data as the first."""


def gelu(x: Tensor, bias: Tensor | None, *, to_fp8: bool) -> tuple[Operand, Operand]:
    """Return GELU(x + bias) and x + bias."""
    num_rows, width = x.shape
    out = empty_operand(num_rows, width, x.device, to_fp8)
    is_stored = to_fp8 or bias is not None
    saved = empty_operand(num_rows, width, x.device, to_fp8) if is_stored else Operand(x)
    _gelu[(num_rows,)](x, bias, *out, *(saved if is_stored else (None, None)), WIDTH=width, **_chunks(width))
    return out, saved


def gelu_backward(grad: Tensor, saved: Operand) -> tuple[Operand, Operand]:
    """Return the gradient of x and the recomputed GELU(x + bias), in the format of `saved`."""
    num_rows, width = grad.shape
    out, recomputed = (empty_operand(num_rows, width, grad.device, saved.scale is not None) for _ in range(2))
    _gelu_backward[(num_rows,)](grad, *saved, *out, *recomputed, WIDTH=width, **_chunks(width))
    return out, recomputed


def _chunks(width: int) -> dict[str, int]:
    chunk = max(min(_CHUNK, width & -width), 1024 if width > 1024 else triton.next_power_of_2(width))
    return {"CHUNK": chunk, "num_warps": max(1, chunk // 256)}


@triton.jit
def _cumulative(x):
    """Return the cumulative distribution function of the normal distribution: GELU(x) is x times that."""
    return 0.5 * tl.erf(x * 0.7071067811865476) + 0.5


@triton.jit
def _load_biased(x_ptr, bias_ptr, column, inside, POLICY: tl.constexpr):
    x = tl.load(x_ptr + column, inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + column, inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _store_once(at, x, inside):
    tl.store(at, x.to(at.dtype.element_ty), inside, eviction_policy=_ONCE)


@triton.jit
def _gelu(
    x_ptr, bias_ptr, out_ptr, out_scale_ptr, saved_ptr, saved_scale_ptr, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):
    row, scale, saved_scale = tl.program_id(0).to(tl.int64), 1.0, 1.0
    x_ptr += row * WIDTH
    if out_scale_ptr is not None:
        highest = tl.zeros([CHUNK], tl.float32)
        lowest = highest
        for start in range(0, WIDTH, CHUNK):
            column = start + tl.arange(0, CHUNK)
            x = _load_biased(x_ptr, bias_ptr, column, column < WIDTH, _AGAIN)
            x = tl.where(column < WIDTH, x, 0.0)
            highest, lowest = tl.maximum(highest, x), tl.minimum(lowest, x)
        most = tl.max(highest, 0)
        saved_scale = scale_of(tl.maximum(most, -tl.min(lowest, 0)), POWERS=True)
        scale = scale_of(tl.maximum(most * _cumulative(most), _LOWEST), POWERS=True)
        tl.store(out_scale_ptr + row, scale)
        tl.store(saved_scale_ptr + row, saved_scale)
    for back in range(0, WIDTH, CHUNK):  # in reverse: the chunks read last are most likely still in L2
        column = (WIDTH - 1) // CHUNK * CHUNK - back + tl.arange(0, CHUNK)
        x = _load_biased(x_ptr, bias_ptr, column, column < WIDTH, _ONCE)
        if saved_ptr is not None:
            _store_once(saved_ptr + row * WIDTH + column, x * (1.0 / saved_scale), column < WIDTH)
        _store_once(out_ptr + row * WIDTH + column, x * _cumulative(x) * (1.0 / scale), column < WIDTH)


@triton.jit
def _gelu_backward(
    grad_ptr, saved_ptr, saved_scale_ptr, out_ptr, out_scale_ptr, again_ptr, again_scale_ptr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, scale, again_scale, saved_scale = tl.program_id(0).to(tl.int64), 1.0, 1.0, 1.0
    if out_scale_ptr is not None:
        saved_scale = tl.load(saved_scale_ptr + row)
        most_grad, most = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
        for start in range(0, WIDTH, CHUNK):
            column = start + tl.arange(0, CHUNK)
            at, inside = row * WIDTH + column, column < WIDTH
            grad = tl.load(grad_ptr + at, inside, other=0.0, eviction_policy=_AGAIN).to(tl.float32)
            most_grad = tl.maximum(most_grad, tl.abs(grad))
            most = tl.maximum(most, tl.load(saved_ptr + at, inside, other=0.0, eviction_policy=_AGAIN).to(tl.float32))
        scale = scale_of(tl.max(most_grad, 0) * _STEEPEST, POWERS=True)
        largest = tl.max(most, 0) * saved_scale
        again_scale = scale_of(tl.maximum(largest * _cumulative(largest), _LOWEST), POWERS=True)
        tl.store(out_scale_ptr + row, scale)
        tl.store(again_scale_ptr + row, again_scale)
    for back in range(0, WIDTH, CHUNK):  # in reverse, as in the forward pass
        column = (WIDTH - 1) // CHUNK * CHUNK - back + tl.arange(0, CHUNK)
        at, inside = row * WIDTH + column, column < WIDTH
        grad = tl.load(grad_ptr + at, inside, other=0.0, eviction_policy=_ONCE).to(tl.float32)
        x = tl.load(saved_ptr + at, inside, other=0.0, eviction_policy=_ONCE).to(tl.float32) * saved_scale
        cumulative = _cumulative(x)
        slope = cumulative + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
        _store_once(out_ptr + at, grad * slope * (1.0 / scale), inside)
        _store_once(again_ptr + at, x * cumulative * (1.0 / again_scale), inside)
