"""Dropout masks in Triton, computed from a hash of seed and position; no mask is stored."""

import triton
import triton.language as tl
from torch import Tensor

from jobs.engines.megatron.hash_kernel import hash32
from jobs.engines.megatron.quantize import Dropout


def mask_args(drop: Dropout | None) -> tuple[int | Tensor, int, float]:
    return (drop.seed, drop.threshold, drop.scale) if drop else (0, 0, 1.0)


jit_for_any_seed = triton.jit(do_not_specialize=["seed", "threshold"])
"""`triton.jit` without specialization on the seed: a kernel is compiled once for all seeds."""


@triton.jit
def is_kept(row, column, width, seed, threshold):
    """Return which elements dropout keeps, as defined by `Dropout.threshold`; width is even."""
    if tl.constexpr(seed.dtype.is_ptr()):
        seed = tl.load(seed)
    bits = hash32((row * (width // 2) + column // 2).to(tl.uint32) ^ seed.to(tl.uint32))
    return tl.where(column % 2 == 0, bits & 0xFFFF, bits >> 16) >= threshold.to(tl.uint32)
