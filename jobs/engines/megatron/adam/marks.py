"""Ranges of a flat tensor, as a list for the host and as tables with which a kernel marks the numbers inside."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 2048
"""How many numbers a program of a kernel processes."""
_END = 2**62
"""Lies behind every number."""


class Marks(NamedTuple):
    """Ranges that do not touch, in order.

    A number lies inside if an odd number of bounds (starts and ends of ranges) lie at or before it.
    """

    ranges: list[tuple[int, int]]
    bounds: Tensor
    """All bounds in order, and then some behind every number, so that a program may read `most_in_block` of them."""
    passed: Tensor
    """For each block of BLOCK numbers: how many bounds lie at or before its first number."""
    most_in_block: int
    """The largest number of bounds that one block has besides."""


def marks(ranges: list[tuple[int, int]], length: int, device: torch.device) -> Marks:
    """Return the ranges of a tensor of this length, with their tables on the device."""
    bounds = np.array([bound for pair in ranges for bound in pair], dtype=np.int64)
    first = np.arange(0, length, BLOCK)
    passed = np.searchsorted(bounds, first, side="right")
    in_block = np.searchsorted(bounds, np.minimum(first + BLOCK, length), side="left") - passed
    most = int(in_block.max(initial=0))
    padded = np.append(bounds, [_END] * (most + 1))
    tables = (torch.from_numpy(x).to(device) for x in (padded, passed.astype(np.int32)))
    return Marks(ranges, *tables, most)
