"""Linears of few rows in Triton, bound by the memory that holds the weights: every weight is read once.

A program computes some outputs for all rows, with FP32 sums. RMSNorm needs no pass of its own: the sums are of
norm_weight * x, and 1 / rms of x, whose squares are summed up on the way, is multiplied at the end. SwiGLU and the
residual are applied where the sums are at hand. The products of one row stay in registers; more rows, up to 64, are
the narrow side of a tensor core's GEMM. Loop bounds are constants because Triton's interpreter needs that.

Shape letters: M rows, I and O input and output of a linear; in comments, of a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.fp8.lora_kernels import FACTOR
from jobs.engines.megatron.generation.weights import Linear
from jobs.engines.megatron.trained.ops import NormWeights
from jobs.weights.nf4 import BLOCK, nf4_levels

MOST_ROWS = 64
_BLOCK = tl.constexpr(BLOCK)
_ONCE = tl.constexpr("evict_first")
"""L2 policy: a step reads each weight once."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How many outputs and inputs a program multiplies at once, how many tiles are on their way, and its warps."""

    outputs: int
    inputs: int
    stages: int
    num_warps: int


ONE_ROW, MORE_ROWS = Tile(8, 512, 3, 4), Tile(32, 256, 4, 4)
"""Chosen by arithmetic, not measured yet."""
OVERLAPPED = False
"""Whether a kernel starts while the one before it ends (programmatic dependent launch); not measured yet."""


def linear(
    x: Tensor,
    weight: Linear,
    *,
    norm: NormWeights | None = None,
    residual: Tensor | None = None,
    in_fp32: bool = False,
) -> Tensor:
    """Return residual + weight norm(x) [M, O], in the dtype of x or in FP32."""
    out = x.new_empty(len(x), weight.shape[0], dtype=torch.float32 if in_fp32 else x.dtype)
    return _launch(x, (weight.values, weight.scale, None, None), norm, residual, out)


def gated(x: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
    """Return silu(gate) * up [M, O / 2] of weight norm(x); gates are the first half of the outputs."""
    half = weight.shape[0] // 2
    weights = (weight.values, weight.scale, weight.values[half:], None if weight.scale is None else weight.scale[half:])
    return _launch(x, weights, norm, None, x.new_empty(len(x), half))


def _launch(
    x: Tensor, weights: tuple[Tensor | None, ...], norm: NormWeights | None, residual: Tensor | None, out: Tensor
) -> Tensor:
    """weights: values and scales of the outputs, and those of ups or None."""
    (num_rows, num_outputs), is_gated = out.shape, weights[2] is not None
    tile = ONE_ROW if num_rows == 1 else MORE_ROWS
    outputs = tile.outputs // 2 if is_gated else tile.outputs
    options = {"OUTPUTS": max(16 if num_rows > 1 else 1, outputs), "INPUTS": tile.inputs, "STAGES": tile.stages}
    options |= {"ROWS": 1 if num_rows == 1 else max(16, triton.next_power_of_2(num_rows)), "WIDTH": x.shape[1]}
    options |= {"OVERLAPPED": OVERLAPPED, "num_warps": tile.num_warps} | ({"launch_pdl": True} if OVERLAPPED else {})
    norm_weight, eps = (norm.weight_H, norm.eps) if norm else (None, 0.0)
    tensors = (x, norm_weight, *weights, nf4_levels(x.device), residual, out)
    _linear[(triton.cdiv(num_outputs, options["OUTPUTS"]),)](*tensors, num_rows, num_outputs, eps, **options)
    return out


@triton.jit
def _weights(
    values_ptr, scale_ptr, levels_ptr, output, begin, num_outputs, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return weights [O, I] from input `begin` on; an FP8 row's scale is left to the end of the sum."""
    is_output = (output < num_outputs)[:, None]
    if values_ptr.dtype.element_ty == tl.uint8:
        byte = begin // 2 + tl.arange(0, INPUTS // 2)[None, :]
        inside = is_output & (byte < WIDTH // 2)
        pair = tl.load(values_ptr + output[:, None] * (WIDTH // 2) + byte, inside, other=0, eviction_policy=_ONCE)
        block = output[:, None] * (WIDTH // _BLOCK) + byte // (_BLOCK // 2)
        absmax = tl.load(scale_ptr + block, inside, other=0.0)
        first = tl.load(levels_ptr + (pair >> 4).to(tl.int32)) * absmax
        second = tl.load(levels_ptr + (pair & 15).to(tl.int32)) * absmax
        return tl.interleave(first, second).to(tl.bfloat16).to(DTYPE)  # rounded as a dequantised weight is
    column = begin + tl.arange(0, INPUTS)[None, :]
    inside = is_output & (column < WIDTH)
    tile = tl.load(values_ptr + output[:, None] * WIDTH + column, inside, other=0.0, eviction_policy=_ONCE)
    return tile.to(DTYPE)


@triton.jit
def _added(sums, weights, x, ROWS: tl.constexpr):
    """Return the sums with the products of one more tile: of one row [O, I], of more rows [O, M]."""
    if ROWS == 1:
        return sums + weights * x
    return tl.dot(weights, tl.trans(x.to(FACTOR)), sums)


@triton.jit
def _finished(sums, values_ptr, scale_ptr, output, num_outputs, ROWS: tl.constexpr):
    """Return the outputs [O, M]."""
    if ROWS == 1:
        sums = tl.sum(sums, 1)[:, None]
    if values_ptr.dtype.element_ty == tl.float8e4nv:
        sums *= tl.load(scale_ptr + output, output < num_outputs, other=0.0)[:, None]
    return sums


@triton.jit
def _linear(
    x_ptr, norm_ptr, values_ptr, scale_ptr, up_ptr, up_scale_ptr, levels_ptr, residual_ptr, out_ptr, num_rows,
    num_outputs, eps, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    output, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    DTYPE: tl.constexpr = tl.float32 if ROWS == 1 else FACTOR
    sums = tl.zeros((OUTPUTS, INPUTS if ROWS == 1 else ROWS), tl.float32)
    up_sums, squares = sums, tl.zeros((ROWS, INPUTS), tl.float32)
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for begin in tl.range(0, WIDTH, INPUTS, num_stages=STAGES):
        column = begin + tl.arange(0, INPUTS)[None, :]
        inside = (row < num_rows)[:, None] & (column < WIDTH)
        x = tl.load(x_ptr + row[:, None] * WIDTH + column, inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + column, column < WIDTH, other=0.0).to(tl.float32)
        tile = _weights(values_ptr, scale_ptr, levels_ptr, output, begin, num_outputs, WIDTH, INPUTS, DTYPE)
        sums = _added(sums, tile, x, ROWS)
        if up_ptr is not None:
            tile = _weights(up_ptr, up_scale_ptr, levels_ptr, output, begin, num_outputs, WIDTH, INPUTS, DTYPE)
            up_sums = _added(up_sums, tile, x, ROWS)
    rstd = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[None, :] if norm_ptr is not None else 1.0
    y = _finished(sums, values_ptr, scale_ptr, output, num_outputs, ROWS) * rstd
    if up_ptr is not None:
        y *= tl.sigmoid(y) * _finished(up_sums, up_ptr, up_scale_ptr, output, num_outputs, ROWS) * rstd
    at = row[None, :] * num_outputs + output[:, None]
    inside = (row < num_rows)[None, :] & (output < num_outputs)[:, None]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y, inside)
