"""NF4, QLoRA's 4-bit format with double quantisation: 4.127 bits per weight.

A weight's rows are split into blocks of 64 numbers, each divided by its largest magnitude (absmax) and rounded to the
nearest of 16 levels. The absmax minus their mean are rounded to 8 bits, in groups of 256 with an FP32 scale each. A
TP rank quantises its part of a weight: levels and absmax equal those of the whole weight, because no block spans two
ranks; the mean and the groups of 256 are the rank's own.

Shape letters: O and I output and input of a linear on this TP rank, K = I / 64 blocks of a row, N = O * K blocks,
G groups.

Source: Dettmers et al. 2023 (QLoRA), and bitsandbytes, which gives the same bits.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK, GROUP = 64, 256
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution, scaled to [-1, 1]; negative and positive separately, so that 0 is a level."""
SMALLEST_ABSMAX = 1e-38
"""The divisor for a block of zeros."""
STORED, STORED_ABSMAX = "weight_nf4", "weight_absmax"
"""Keys of a linear in NF4 checkpoints: numbers [O, I / 2] and absmax [O, K] in BF16, which is exact."""
_CHUNK = 2**24
"""Weights quantised at once; more would only need more memory."""


class Nf4(NamedTuple):
    """A weight in NF4. Of two neighbours in a row, the first is in the high 4 bits of their byte."""

    codes: Tensor
    """[O, I / 2], uint8."""
    absmax: Tensor
    """[N], uint8: indices into `dynamic_map`."""
    scales: Tensor
    """[G] in FP32."""
    offset: Tensor
    """[1] in FP32: the mean of the absmax."""


def quantize(weight_OI: Tensor) -> Nf4:
    codes, absmax_OK = quantize_blocks(weight_OI)
    return Nf4(codes, *quantize_absmax(absmax_OK))


def quantize_blocks(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers [O, I / 2] and each block's absmax [O, K] in the weight's type."""
    rows = max(1, _CHUNK // weight_OI.shape[1])
    parts = [_quantize_rows(part) for part in weight_OI.split(rows)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([absmax for _, absmax in parts])


def quantize_absmax(absmax_OK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the absmax in 8 bits [N], the scale of each group [G] and the offset [1]."""
    absmax_N = absmax_OK.float().flatten()
    offset = absmax_N.mean().view(1)
    centred_N = absmax_N - offset
    padding = -len(centred_N) % GROUP
    groups = torch.nn.functional.pad(centred_N, (0, padding)).view(-1, GROUP)
    scales_G = groups.abs().amax(1).clamp(min=SMALLEST_ABSMAX)
    levels = dynamic_map(absmax_OK.device)
    codes = torch.bucketize(groups * (1 / scales_G)[:, None], _midpoints(levels), out_int32=True).to(torch.uint8)
    return codes.flatten()[: len(absmax_N)].clone(), scales_G, offset


def dequantize(weight: Nf4, dtype: torch.dtype) -> Tensor:
    """Return the weight [O, I]; sums and products are in FP32."""
    codes = torch.stack([weight.codes >> 4, weight.codes & 15], dim=-1).flatten(1)
    values = nf4_levels(codes.device)[codes.int()]
    return (values.view(-1, BLOCK) * dequantize_absmax(weight)[:, None]).to(dtype).view(codes.shape)


def dequantize_absmax(weight: Nf4) -> Tensor:
    """Return each block's absmax [N] in FP32."""
    scales_N = weight.scales.repeat_interleave(GROUP)[: len(weight.absmax)]
    return dynamic_map(weight.absmax.device)[weight.absmax.int()] * scales_N + weight.offset


@cache
def nf4_levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)


@cache
def dynamic_map(device: torch.device) -> Tensor:
    """Return the 256 levels of an absmax, from -0.993 to 1, finer towards zero.

    Each power of ten from 1e-6 to 1 has twice as many levels as the one before: the midpoints of equal parts of
    [0.1, 1] times the power, with both signs; and 0 and 1. Source: bitsandbytes, functional.create_dynamic_map.
    """
    levels = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        levels += [middles, -middles]
    return torch.cat(levels).sort().values.to(device)


def _quantize_rows(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight_OI.unflatten(1, (-1, BLOCK))
    absmax_OK = blocks.abs().amax(2)
    unit = blocks.float() * (1 / absmax_OK.float().clamp(min=SMALLEST_ABSMAX))[..., None]
    midpoints = _midpoints(nf4_levels(weight_OI.device))
    codes = torch.bucketize(unit.flatten(1), midpoints, out_int32=True).to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2], absmax_OK


def _midpoints(levels: Tensor) -> Tensor:
    return (levels[:-1] + levels[1:]) / 2
