"""AdamW's update as one Triton kernel per shard; the module `update` documents what each function does.

The kernel reads gradient, master weight, moments and the clipping factor, and writes master weight, moments and the
model's weight: 30 bytes per weight with moments in FP32, 22 in BF16. It is bound by memory bandwidth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.adam.shards import BLOCK, Shard
from jobs.engines.megatron.adam.update import Moments, Step
from jobs.engines.megatron.hash_kernel import hash32


def sum_of_squares(shards: list[Shard]) -> Tensor:
    return torch.stack([_squares_of(shard) for shard in shards]).sum()


def _squares_of(shard: Shard) -> Tensor:
    length, counted = len(shard.grad), shard.counted
    parts = torch.empty(triton.cdiv(length, BLOCK), dtype=torch.float32, device=shard.grad.device)
    options = {"MOST": counted.max_bounds_in_block, "BLOCK": BLOCK, "num_warps": 8}
    _squares[(len(parts),)](shard.grad, parts, counted.bounds, counted.passed, length, **options)
    return parts.sum()


def update(shard: Shard, moments: Moments, factor: Tensor, step: Step) -> None:
    length, decayed = len(shard.grad), shard.decayed
    tensors = (shard.grad, shard.master, shard.weights, *moments, factor, decayed.bounds, decayed.passed)
    rates = (step.decay, step.beta1, 1 - step.beta1, step.beta2, 1 - step.beta2, step.size, step.root, step.eps)
    options = {"MOST": decayed.max_bounds_in_block, "BLOCK": BLOCK, "num_warps": 8}
    _update[(triton.cdiv(length, BLOCK),)](*tensors, *rates, step.seed(shard.bucket), shard.first, length, **options)


@triton.jit
def _is_inside(at, bounds_ptr, passed_ptr, MOST: tl.constexpr):
    """Return which elements are inside the ranges of a `RangeTable`."""
    first_bound = tl.load(passed_ptr + tl.program_id(0))
    passed = tl.zeros_like(at) + first_bound
    for i in tl.static_range(MOST):
        passed += tl.where(at >= tl.load(bounds_ptr + first_bound + i), 1, 0)
    return passed % 2 == 1


@triton.jit
def _squares(grad_ptr, out_ptr, bounds_ptr, passed_ptr, length, MOST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + at, at < length, other=0.0)
    grad = tl.where(_is_inside(at, bounds_ptr, passed_ptr, MOST), grad, 0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(grad * grad, 0))


@triton.jit(do_not_specialize=["seed", "first"])
def _update(
    grad_ptr, master_ptr, weight_ptr, avg_ptr, sq_ptr, factor_ptr, bounds_ptr, passed_ptr,
    decay, beta1, rest1, beta2, rest2, size, root, eps, seed, first, length,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    grad = tl.load(grad_ptr + at, inside, other=0.0) * tl.load(factor_ptr)
    avg = tl.load(avg_ptr + at, inside, other=0.0).to(tl.float32)
    sq = tl.load(sq_ptr + at, inside, other=0.0).to(tl.float32)
    master = tl.load(master_ptr + at, inside, other=0.0)
    avg += rest1 * (grad - avg)
    sq = beta2 * sq + rest2 * grad * grad
    master = tl.where(_is_inside(at, bounds_ptr, passed_ptr, MOST), master * decay, master)
    master -= size * avg / (tl.sqrt(sq) / root + eps)
    tl.store(master_ptr + at, master, inside)
    tl.store(weight_ptr + at, master.to(weight_ptr.dtype.element_ty), inside)
    if avg_ptr.dtype.element_ty == tl.bfloat16:
        bits = _random_bits(first + at, seed)
        avg, sq = _rounded(avg, bits & 0xFFFF), _rounded(sq, bits >> 16)
    tl.store(avg_ptr + at, avg.to(avg_ptr.dtype.element_ty), inside)
    tl.store(sq_ptr + at, sq.to(sq_ptr.dtype.element_ty), inside)


@triton.jit
def _rounded(x, bits):
    """Return FP32 values rounded stochastically to BF16 values, with 16 random bits each."""
    raw = (x.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000
    return tl.where(x == x, raw.to(tl.float32, bitcast=True), x)


@triton.jit
def _random_bits(index, seed):
    return hash32(hash32(index.to(tl.uint32) ^ seed.to(tl.uint32)) + (index >> 32).to(tl.uint32))
