"""Transposed weights for the gradients' products: there is no room to keep them, so each is made while the product before it runs.

Two buffers take turns on a stream of their own. The order is that of the backward pass, as `follow` lays it down; who asks out
of turn is served all the same, only without the overlap.
"""

from collections.abc import Sequence

import torch

from jobs.engines.megatron.fp8 import gpu_ops
from jobs.engines.megatron.fp8.quantize import Quantized


class _Turner:
    """The two buffers, and which linear's weight lies in each."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.buffers: list[torch.Tensor] = []
        self.held: list[torch.nn.Module | None] = [None, None]
        self.done = [torch.cuda.Event(), torch.cuda.Event()]
        self.next = 0

    def get(self, linear: torch.nn.Module) -> Quantized:
        """Return a linear's weight, transposed, until two others are asked for; begin with the one that follows."""
        if linear not in self.held:
            self._begin(linear)
        slot = self.held.index(linear)
        self.done[slot].wait()
        self.held[slot] = None
        turned = self._view(linear, slot)
        if linear.follower is not None:
            self.next = 1 - slot
            self._begin(linear.follower)
        return turned

    def _begin(self, linear: torch.nn.Module) -> None:
        """Transpose into the buffer whose turn it is, once the products that were asked for so far have read it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            gpu_ops.transpose(linear.quantized, self._buffer(linear.weight.numel()))
            self.done[self.next].record()
        self.held[self.next] = linear
        self.next = 1 - self.next

    def _buffer(self, size: int) -> torch.Tensor:
        return self.buffers[self.next][:size]

    def _view(self, linear: torch.nn.Module, slot: int) -> Quantized:
        num_out, num_in = linear.weight.shape
        values = self.buffers[slot][: linear.weight.numel()].view(num_in, num_out)
        return Quantized(values.view(linear.quantized.values.dtype), linear.weight_scale)


_turner: _Turner | None = None


def turned(linear: torch.nn.Module) -> Quantized:
    """Return the weight [I, O] of a frozen FP8 linear, transposed from [O, I]; valid until two others are asked for."""
    assert _turner is not None
    return _turner.get(linear)


def follow(linears: Sequence[torch.nn.Module]) -> None:
    """Say in which order the backward pass asks, and make the buffers."""
    global _turner
    _turner = _Turner()
    size = max(linear.weight.numel() for linear in linears)
    _turner.buffers = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for linear, follower in zip(linears, [*linears[1:], None], strict=True):
        object.__setattr__(linear, "follower", follower)  # no submodule
