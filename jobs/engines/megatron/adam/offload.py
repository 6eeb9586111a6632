"""Adam's moments in host memory, for models whose optimizer states do not fit into device memory.

A step copies the moments to the device in pieces, updates them there and copies them back. Two pairs of buffers
alternate, and the copies run on separate streams, in both directions at once. So a step takes the time of copying all
moments one way: 8 bytes per weight in FP32 and 4 in BF16. A model of 6.7e9 weights on one GPU has 54 GB of moments in
FP32, which PCIe 5 copies at 55 GB/s each way: about 1.0 s a step, and 0.5 s in BF16.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from jobs.engines.megatron.adam.shards import Shard
from jobs.engines.megatron.adam.update import Moments

PIECE = 2**25
"""Elements of a piece. A power of two, because torch rounds the size of pinned memory up to one."""


class Piece(NamedTuple):
    """A part of a shard, and its moments in the memory where they are between steps."""

    shard: Shard
    moments: Moments


class MomentStreamer:
    """Streams the moments of pieces through two pairs of device buffers; on a CPU without overlap."""

    def __init__(self, pieces: list[Piece]) -> None:
        device, dtype = pieces[0].shard.grad.device, pieces[0].moments.exp_avg.dtype
        longest = max(len(piece.shard.grad) for piece in pieces)
        self.buffers = [Moments(*torch.empty(2, longest, dtype=dtype, device=device)) for _ in range(2)]
        self.library = torch.cuda if device.type == "cuda" else torch.cpu
        self.copy_in, self.copy_out = self.library.Stream(), self.library.Stream()
        self.copied_out = [self.library.Event(), self.library.Event()]
        self.current = 0

    def update(self, pieces: list[Piece], update: Callable[[Shard, Moments], None]) -> None:
        """Call `update` on every piece, with its moments in a device buffer."""
        for piece in pieces:
            current, self.current = self.current, 1 - self.current
            moments = Moments(*(buffer[: len(piece.shard.grad)] for buffer in self.buffers[current]))
            with self.library.stream(self.copy_in):
                self.copied_out[current].wait()
                _copy(piece.moments, to=moments)
            self.library.current_stream().wait_stream(self.copy_in)
            update(piece.shard, moments)
            self.copy_out.wait_stream(self.library.current_stream())
            with self.library.stream(self.copy_out):
                _copy(moments, to=piece.moments)
                self.copied_out[current].record()


def _copy(moments: Moments, *, to: Moments) -> None:
    for source, target in zip(moments, to, strict=True):
        target.copy_(source, non_blocking=True)


def pieces_of(shards: list[Shard], dtype: torch.dtype, *, offload: bool) -> list[Piece]:
    """Return the pieces of all shards, with memory for their moments; offload: small pieces, in pinned host memory."""
    if offload:
        shards = [shard.part(begin, begin + PIECE) for shard in shards for begin in range(0, len(shard.grad), PIECE)]
    return [Piece(shard, _moments(shard, dtype, offload=offload)) for shard in shards]


def _moments(shard: Shard, dtype: torch.dtype, *, offload: bool) -> Moments:
    device = "cpu" if offload else shard.grad.device
    pin_memory = offload and shard.grad.is_cuda
    size = len(shard.grad)
    return Moments(*(torch.empty(size, dtype=dtype, device=device, pin_memory=pin_memory) for _ in range(2)))
