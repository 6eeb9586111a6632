"""Memory of a TP rank that the other ranks of its replica write to, over NVLink: for sums of a few rows.

NCCL's all-reduce of one row takes 18 us between two H200s, most of it latency; `peer_kernels` needs one trip over
NVLink, and 2 us (docs/results/2026-11-26-several-gpus.md). Larger messages stay with NCCL: here every rank receives the
values of every other rank.

The memory is torch's symmetric memory, which torch maps into all processes of a group. NVLink multicast is not used.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import triton
from torch import Tensor
from torch.distributed import ProcessGroup

from jobs.engines.megatron.generation import peer_kernels
from jobs.engines.megatron.generation.one_row_kernels import launch_options

T = TypeVar("T")
VALUES = 1024
"""Values of a program: 16 bytes for each of 128 threads."""
MOST_SENT_BYTES = 2**20
"""What a rank sends to all others in one sum, at most. It also limits the programs to 512, which fit on a GPU."""
MOST_SLOTS = 512
"""Slots whose tokens are chosen through this memory, at most: a program for each waits on the GPU."""
_HALVES = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer in the memory of each rank: two halves, each with a part for the values of each rank."""

    addresses: tuple[int, ...]
    """Addresses of the buffers of all ranks in this process."""
    counts: Tensor
    """Calls of each program, in int32. The half of a call is its number modulo 2."""
    most: int
    """Values of a part."""


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """The buffers for sums and for the best tokens; made by `share`."""

    rank: int
    size: int
    sums: Buffer
    best: Buffer
    own: Sequence[Tensor] = ()
    """This rank's memory of both buffers."""

    @property
    def most_bytes(self) -> int:
        """The size of the largest sum."""
        return 2 * self.sums.most

    def sums_here(self, x: Tensor) -> bool:
        """Return whether `sum_` adds this tensor: of BF16, and few values."""
        return x.dtype is torch.bfloat16 and x.is_contiguous() and x.numel() <= self.sums.most

    def sum_(self, x: Tensor) -> Tensor:
        """Replace x by its sum over the ranks, added in FP32 in the order of the ranks, and return it."""
        options = {"RANK": self.rank, "RANKS": self.size, "MOST": self.sums.most, "VALUES": VALUES, "num_warps": 4}
        tensors = (x.view(torch.int16), self.sums.addresses, self.sums.counts)
        grid = (triton.cdiv(x.numel(), VALUES),)
        peer_kernels.sum_over_ranks[grid](*tensors, x.numel(), **options, **launch_options())
        return x


def most_values(size: int) -> int:
    """Return the number of BF16 values of the largest sum of this many ranks, a multiple of VALUES."""
    return MOST_SENT_BYTES // (size - 1) // 2 // VALUES * VALUES


def share(group: ProcessGroup, device: torch.device) -> tuple[PeerMemory | None, str]:
    """Return the memory that the ranks of a group share, or None with the reason; all ranks call this together."""
    others = _gathered(group, device.index)
    reasons = _gathered(group, _obstacle(device, others))
    if reason := next(filter(None, reasons), ""):
        return None, reason
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # creating it fails on some machines
    memory, reason = None, ""
    try:
        memory = _shared(group, device)
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        reason = f"torch cannot share memory: {first_line:.200}"
    if reason := next(filter(None, _gathered(group, reason)), ""):
        return None, reason
    return memory, ""


def _obstacle(device: torch.device, others: Sequence[int | None]) -> str:
    """Return why this rank cannot reach the GPUs of the others; empty if it can."""
    for other in others:
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            return f"GPU {device.index} cannot access the memory of GPU {other}"
    return ""


def _shared(group: ProcessGroup, device: torch.device) -> PeerMemory:
    """Return the memory of the group, all of it empty. `share` waits until every rank has emptied its own."""
    buffers = (
        _buffer(group, device, torch.int16, most_values(group.size()), VALUES),
        _buffer(group, device, torch.int64, MOST_SLOTS, 1),
    )
    torch.cuda.synchronize()
    sums, best = (buffer for buffer, _ in buffers)
    return PeerMemory(group.rank(), group.size(), sums, best, [own for _, own in buffers])


def _buffer(
    group: ProcessGroup, device: torch.device, dtype: torch.dtype, most: int, per_program: int
) -> tuple[Buffer, Tensor]:
    """Return a buffer with parts of `most` values, and this rank's memory of it, which is empty."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(_HALVES * group.size() * most, dtype=dtype, device=device)
    own.fill_(peer_kernels.EMPTY[dtype])
    mapped = symmetric_memory.rendezvous(own, group)
    offset = own.data_ptr() - mapped.buffer_ptrs[group.rank()]  # the same on all ranks: they allocate alike
    addresses = tuple(begin + offset for begin in mapped.buffer_ptrs)
    return Buffer(addresses, torch.zeros(most // per_program, dtype=torch.int32, device=device), most), own


def _gathered(group: ProcessGroup, value: T) -> list[T]:
    """Return the value of each rank of the group."""
    values = [value] * group.size()
    torch.distributed.all_gather_object(values, value, group=group)
    return values
