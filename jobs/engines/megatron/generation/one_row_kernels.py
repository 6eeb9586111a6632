"""Linears of one row in Triton, bound by the memory bandwidth of the weights: every weight is read once.

A program computes some outputs; products and FP32 sums stay in registers. RMSNorm needs no separate pass: the kernel
sums norm_weight * x and the squares of x in the same loop, and multiplies by 1 / rms of x at the end. SwiGLU and the
residual are applied to the sums in registers. Loop bounds are constants because Triton's interpreter needs them.

Shape letters: I and O input and output of a linear; in comments, of a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from jobs.engines.megatron.generation.weights import Linear
from jobs.engines.megatron.trained.ops import NormWeights
from jobs.engines.megatron.triton_target import HAS_PTX
from jobs.weights.nf4 import BLOCK, nf4_levels

_BLOCK = tl.constexpr(BLOCK)
ONCE = tl.constexpr("evict_first")
"""L2 policy: a step reads each weight once."""
IS_OVERLAPPED = HAS_PTX.value
"""Whether a kernel may start before the previous one has ended (programmatic dependent launch): saves 1 to 2 % per
token."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Outputs and inputs of a tile, the number of pipeline stages, and the warps of a program."""

    outputs: int
    inputs: int
    stages: int
    num_warps: int


WeightOperands = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Values and scales of the outputs, or of gates and of ups if the outputs are silu(gate) * up."""

WIDE, NARROW, NARROW_DEEP = Tile(32, 256, 4, 4), Tile(16, 512, 3, 4), Tile(16, 256, 5, 4)
NF4_WIDE, NF4_NARROW = Tile(32, 256, 1, 4), Tile(16, 512, 1, 4)
"""With more stages the absmax of 4-bit weights would be copied one by one."""
SMALL = 2**25
"""Weights of the largest BF16 linear (of its gates alone) that is faster with the tiles of small ones."""


def tile_of(weights: WeightOperands, *, has_norm: bool) -> Tile:
    """Return the tile of a linear: the fastest one on an H200, or within 2 % of it.

    A program loads x and the norm's weights once for all of its outputs. Sources: docs/results/2026-11-23-generation.md
    for one GPU, and docs/results/2026-11-26-four-gpus.md for FP8 and for the smaller linears of TP.
    """
    values, is_gated = weights[0], weights[2] is not None
    is_normed = has_norm and not is_gated
    if values.dtype is torch.uint8:
        return NF4_WIDE if is_normed else NF4_NARROW
    if values.dtype is not torch.bfloat16:
        return WIDE if is_gated else NARROW
    is_small = values.numel() // (2 if is_gated else 1) <= SMALL
    if is_normed or (is_gated and is_small):
        return WIDE
    return NARROW_DEEP if is_small and not is_gated else NARROW


def plain_operands(weight: Linear) -> WeightOperands:
    return weight.values, weight.scale, None, None


def gated_operands(weight: Linear) -> WeightOperands:
    """Return the operands of a weight whose first half of outputs are gates."""
    half = weight.shape[0] // 2
    return weight.values, weight.scale, weight.values[half:], None if weight.scale is None else weight.scale[half:]


def launch_options() -> dict[str, bool]:
    """Return the options for programmatic dependent launch."""
    return {"OVERLAPPED": True, "launch_pdl": True} if IS_OVERLAPPED else {"OVERLAPPED": False}


def multiply(
    x: Tensor, weights: WeightOperands, *, norm: NormWeights | None, residual: Tensor | None, out: Tensor
) -> Tensor:
    """Fill `out` [1, O] with the products of x [1, I], and return it."""
    num_outputs, is_gated = out.shape[1], weights[2] is not None
    tile = tile_of(weights, has_norm=norm is not None)
    outputs = tile.outputs // 2 if is_gated else tile.outputs
    options = {"OUTPUTS": outputs, "INPUTS": tile.inputs, "STAGES": tile.stages, "WIDTH": x.shape[1]}
    options |= {"num_warps": tile.num_warps} | launch_options()
    norm_weight, eps = (norm.weight_H, norm.eps) if norm else (None, 0.0)
    tensors = (x, norm_weight, *weights, nf4_levels(x.device), residual, out)
    _linear[(triton.cdiv(num_outputs, outputs),)](*tensors, num_outputs, eps, **options)
    return out


@triton.jit
def weights_tile(
    values_ptr, scale_ptr, levels_ptr, output, begin, num_outputs, WIDTH: tl.constexpr, INPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return weights [O, I] starting at input `begin`; the row scales of FP8 are applied to the final sum."""
    is_output = (output < num_outputs)[:, None]
    if values_ptr.dtype.element_ty == tl.uint8:
        byte = begin // 2 + tl.arange(0, INPUTS // 2)[None, :]
        inside = is_output & (byte < WIDTH // 2)
        pair = tl.load(values_ptr + output[:, None] * (WIDTH // 2) + byte, inside, other=0, eviction_policy=ONCE)
        block = output[:, None] * (WIDTH // _BLOCK) + byte // (_BLOCK // 2)
        absmax = tl.load(scale_ptr + block, inside, other=0.0)
        first = tl.load(levels_ptr + (pair >> 4).to(tl.int32)) * absmax
        second = tl.load(levels_ptr + (pair & 15).to(tl.int32)) * absmax
        tile = tl.interleave(first, second).to(tl.bfloat16)  # rounded like a dequantised weight
    else:
        column = begin + tl.arange(0, INPUTS)[None, :]
        inside = is_output & (column < WIDTH)
        tile = tl.load(values_ptr + output[:, None] * WIDTH + column, inside, other=0.0, eviction_policy=ONCE)
    return tile.to(DTYPE)


@triton.jit
def _sum(products, values_ptr, scale_ptr, output, num_outputs):
    y = tl.sum(products, 1)
    if values_ptr.dtype.element_ty == tl.float8e4nv:
        y *= tl.load(scale_ptr + output, output < num_outputs, other=0.0)
    return y


@triton.jit
def _linear(
    x_ptr, norm_ptr, values_ptr, scale_ptr, up_ptr, up_scale_ptr, levels_ptr, residual_ptr, out_ptr, num_outputs, eps,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, WIDTH: tl.constexpr, OVERLAPPED: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    products, squares = tl.zeros((OUTPUTS, INPUTS), tl.float32), tl.zeros((1, INPUTS), tl.float32)
    up_products = products
    if OVERLAPPED:
        gdc_wait()
    for begin in tl.range(0, WIDTH, INPUTS, num_stages=STAGES):
        column = begin + tl.arange(0, INPUTS)[None, :]
        x = tl.load(x_ptr + column, column < WIDTH, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + column, column < WIDTH, other=0.0).to(tl.float32)
        tile = weights_tile(values_ptr, scale_ptr, levels_ptr, output, begin, num_outputs, WIDTH, INPUTS, tl.float32)
        products += tile * x
        if up_ptr is not None:
            tile = weights_tile(up_ptr, up_scale_ptr, levels_ptr, output, begin, num_outputs, WIDTH, INPUTS, tl.float32)
            up_products += tile * x
    if OVERLAPPED:
        gdc_launch_dependents()
    rstd = tl.rsqrt(tl.sum(squares) / WIDTH + eps) if norm_ptr is not None else 1.0
    y = _sum(products, values_ptr, scale_ptr, output, num_outputs) * rstd
    if up_ptr is not None:
        y *= tl.sigmoid(y) * _sum(up_products, up_ptr, up_scale_ptr, output, num_outputs) * rstd
    inside = output < num_outputs
    if residual_ptr is not None:
        y += tl.load(residual_ptr + output, inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + output, y, inside)
