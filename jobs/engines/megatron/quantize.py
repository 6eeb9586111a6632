"""FP8 tensors: E4M3 values with one FP32 scale per row, or one per weight; and LoRA's dropout mask.

The engine and the conversion of checkpoints both quantise weights with this module. GPU and CPU give the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
"""The type of a GEMM's output."""
LARGEST = 448.0
"""The largest E4M3 number; a row is scaled so that its largest magnitude becomes this."""
SMALLEST_AMAX = 1e-12
"""Minimum of amax, so that the scale of a row of zeros is above 0."""
STORED, STORED_SCALE = "weight_fp8", "weight_scale"
"""Keys of a linear's weight in FP8 checkpoints. The key is not `weight`, because the values still need their scale."""


class Quantized(NamedTuple):
    """values * scale is the tensor: values in FP8 [M, N], scale in FP32 [M] (of a weight: [1], or repeated).

    If the tensor is not quantised, values is the tensor itself and scale is None.
    """

    values: Tensor
    scale: Tensor | None = None


def amax(weight: Tensor) -> Tensor:
    """Return a weight's largest magnitude [1] in FP32."""
    return weight.abs().max().float().view(1)


def weight_scale(amax: Tensor) -> Tensor:
    """Return the scale [1] of a full weight, from the largest magnitude over all its parts."""
    # On a GPU torch divides by a Python number through its reciprocal, which may round differently; not by a tensor.
    return amax.clamp(min=SMALLEST_AMAX) / torch.full_like(amax, LARGEST)


def quantize_weight(weight: Tensor, scale: Tensor, dtype: torch.dtype = FP8) -> Tensor:
    """Return a weight, or any part of it, in FP8."""
    return (weight.float() / scale).to(dtype)


class Dropout(NamedTuple):
    """A dropout mask with dropout probability p. It is not stored: each kernel recomputes it from the seed."""

    p: float
    seed: int | Tensor
    """31 bits; in a captured pass a scalar int64 tensor in device memory."""

    @property
    def threshold(self) -> int:
        """Return the smallest 16-bit random number for which an element is kept.

        An element's 16 bits are one half of a 32-bit hash of index and seed, which two neighbouring elements share.
        """
        return min(round(self.p * 2**16), 2**16 - 1)

    @property
    def scale(self) -> float:
        """Return the factor for kept elements, which preserves the mean."""
        return 1 / (1 - self.threshold / 2**16)


class Lora(NamedTuple):
    """An adapter's contribution to its linear's output: scale * low B^T, for low [M, R] and B [O, R]."""

    low: Tensor
    b: Tensor
    scale: float


class Adapted(NamedTuple):
    """An adapter's contribution to the gradient of its linear's input: `grad`, with the forward pass's dropout mask."""

    grad: Tensor
    drop: Dropout
