"""FP8 tensors: E4M3 numbers with one FP32 scale for each row, or one for a whole weight; and LoRA's dropout mask.

Weights are quantised here for the engine and for the conversion of checkpoints. A GPU and a CPU give the same bits.
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
"""Keeps the scale of a row of zeros above 0."""
STORED, STORED_SCALE = "weight_fp8", "weight_scale"
"""Keys of a linear's weight in FP8 checkpoints. Another key than `weight`, since the values still need their scale."""


class Quantized(NamedTuple):
    """values * scale is the tensor: values in FP8 [M, N], scale in FP32 [M] (of a weight: [1], or it repeated).

    Where nothing was quantised, values is the tensor itself and scale is None.
    """

    values: Tensor
    scale: Tensor | None = None


def amax(weight: Tensor) -> Tensor:
    """Return a weight's largest magnitude [1] in FP32."""
    return weight.abs().max().float().view(1)


def weight_scale(amax: Tensor) -> Tensor:
    """Return the scale [1] of a whole weight, from its largest magnitude over all its parts."""
    # On a GPU torch divides by a Python number through its reciprocal, which may round to another bit; not by a tensor.
    return amax.clamp(min=SMALLEST_AMAX) / torch.full_like(amax, LARGEST)


def quantize_weight(weight: Tensor, scale: Tensor, dtype: torch.dtype = FP8) -> Tensor:
    """Return a weight, or any part of it, in FP8."""
    return (weight.float() / scale).to(dtype)


class Dropout(NamedTuple):
    """A dropout mask that drops a share p. It is not stored: each kernel computes it again from the seed."""

    p: float
    seed: int | Tensor
    """31 bits; those of a captured pass lie in the device's memory (int64, no dimension)."""

    @property
    def threshold(self) -> int:
        """Return the least 16-bit random number with which an element is kept.

        An element's 16 bits are one half of a 32-bit hash of its index and the seed, which two neighbours share.
        """
        return min(round(self.p * 2**16), 2**16 - 1)

    @property
    def scale(self) -> float:
        """Return what the kept elements are multiplied by, so that the mean stays what it was."""
        return 1 / (1 - self.threshold / 2**16)


class Lora(NamedTuple):
    """What an adapter adds to its linear's output: scale * low B^T, for low [M, R] and B [O, R]."""

    low: Tensor
    b: Tensor
    scale: float


class Adapted(NamedTuple):
    """What an adapter adds to the gradient of its linear's input: `grad` under the forward pass's dropout mask."""

    grad: Tensor
    drop: Dropout
