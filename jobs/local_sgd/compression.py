"""Encode FP32 numbers as the bytes that are sent between groups, and decode them.

int8: SCALED numbers share a scale, the largest of them over 127. The error of each number is at most half a scale.
"""

import torch
from torch import Tensor

from bench.contract.local_sgd import SCALED, Compress

MULTIPLE = SCALED
"""The count of encoded numbers must be a multiple of this."""


def encoded(numbers: Tensor, compress: Compress) -> Tensor:
    """Encode flat FP32 numbers."""
    if compress is Compress.none:
        return numbers.contiguous().view(torch.uint8)
    if compress is Compress.bf16:
        return numbers.bfloat16().view(torch.uint8)
    blocks = numbers.view(-1, SCALED)
    scales = blocks.abs().amax(dim=1, keepdim=True) / 127
    whole = (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scales.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8)])


def decoded(raw: Tensor, compress: Compress) -> Tensor:
    """Decode bytes to FP32 numbers."""
    if compress is Compress.none:
        return raw.view(torch.float32)
    if compress is Compress.bf16:
        return raw.view(torch.bfloat16).float()
    num_blocks = raw.numel() // (SCALED + 4)
    scales, whole = raw[: 4 * num_blocks].view(torch.float32), raw[4 * num_blocks :].view(torch.int8)
    return (whole.view(num_blocks, SCALED).float() * scales.view(-1, 1)).view(-1)
