"""FP8 copies of trained weights, updated once a step without waiting for the device."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.fp8_gemm import transpose
from jobs.engines.megatron.linear_weights import PrefetchedTransposes
from jobs.engines.megatron.quantize import FP8, Quantized, weight_scale
from jobs.engines.megatron.tensor_parallel import ParallelLinear
from jobs.engines.megatron.trained.ops import Operand

_TILE = 128
_MULTIPLE = 16
"""cuBLASLt needs rows of a multiple of 16 bytes; the padding is zero."""


def tokens_last(x: Operand) -> Operand:
    """Return FP8 rows [M, I] transposed to [I, M padded to 16 tokens], with one scale [1]."""
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


class Fp8Weights:
    """`LinearWeights` in FP8 on a GPU: a copy of each weight with one scale, transposed for the backward pass.

    The TP ranks of a weight share its scale, so that rounding does not depend on tp.
    """

    def __init__(self, linears: Sequence[ParallelLinear]) -> None:
        self.linears = linears
        device = linears[0].weight.device
        self.scales = torch.ones(len(linears), 1, device=device)
        self.copies = {
            linear: Quantized(torch.empty(linear.weight.shape, dtype=FP8, device=device), scale)
            for linear, scale in zip(linears, self.scales, strict=True)
        }
        self.transposes = PrefetchedTransposes(linears, transpose, self.copies.__getitem__)

    def forward(self, linear: ParallelLinear) -> Operand:
        return self.transposes.forward(linear)

    def backward(self, linear: ParallelLinear) -> Operand:
        return self.transposes.backward(linear)

    @torch.no_grad()
    def refresh(self, linears: Sequence[ParallelLinear] | None = None) -> None:
        """Quantise the weights again."""
        linears = linears or self.linears
        self.transposes.invalidate()
        amax = torch.stack([torch.linalg.vector_norm(linear.weight, float("inf")) for linear in linears]).float()
        group = self.linears[0].tp_group
        if group.size() > 1:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=group)
        first = self.linears.index(linears[0])
        self.scales[first : first + len(linears)].copy_(weight_scale(amax)[:, None])
        for linear in linears:
            copy = self.copies[linear]
            assert copy.scale is not None
            quantize_tensor(linear.weight, copy.scale, copy.values)
