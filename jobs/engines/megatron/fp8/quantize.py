"""FP8 as this engine uses it: E4M3 numbers with one FP32 scale a row, or one for a whole weight; and LoRA's dropout mask.

Weights are quantised here, for the engine and for who converts checkpoints: the same bits on a GPU and on a CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
"""What products come out as."""
LARGEST = 448.0
"""Of E4M3; a row is scaled so that its largest number becomes this."""
SMALLEST_AMAX = 1e-12
"""Rows of zeros keep a scale above 0."""
STORED, STORED_SCALE = "weight_fp8", "weight_scale"
"""A linear's weight in checkpoints that hold it in FP8. It is not called `weight`: nobody must take it for the numbers themselves."""


class Quantized(NamedTuple):
    """values * scale is the tensor: values in FP8 [M, N], scale in FP32 [M] (of a weight: [1])."""

    values: Tensor
    scale: Tensor


def amax(weight: Tensor) -> Tensor:
    """Return a weight's largest magnitude [1] in FP32."""
    return weight.abs().max().float().view(1)


def weight_scale(amax: Tensor) -> Tensor:
    """Return the scale [1] of a whole weight, from its largest magnitude over all its parts."""
    # By a tensor: a GPU divides by a number as it multiplies by the reciprocal, which may end in another bit.
    return amax.clamp(min=SMALLEST_AMAX) / torch.full_like(amax, LARGEST)


def quantize_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """Return a weight, or any part of it, in FP8."""
    return (weight.float() / scale).to(FP8)


class Dropout(NamedTuple):
    """Which numbers of a tensor are dropped, made again from the seed wherever it is needed instead of kept."""

    p: float
    seed: int

    @property
    def threshold(self) -> int:
        """A number stays if its 16 bits, half of a hash that it shares with its neighbour, are at least this."""
        return min(round(self.p * 2**16), 2**16 - 1)

    @property
    def scale(self) -> float:
        return 1 / (1 - self.threshold / 2**16)


class Lora(NamedTuple):
    """What an adapter adds to its linear's output: scale * low B^T, for low [M, R] and B [O, R]."""

    low: Tensor
    b: Tensor
    scale: float


class Adapted(NamedTuple):
    """What an adapter adds to a gradient: dropout of it, by the mask of the forward pass."""

    grad: Tensor
    drop: Dropout
