"""Prefetched weights for GEMMs: transposed or dequantised on a separate stream while the previous GEMM runs.

GPU memory cannot hold all of them at once, so two buffers alternate.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

import torch
from torch import Tensor

from bench.contract.modules import Part
from jobs.engines.megatron.quantize import BF16, Quantized
from jobs.engines.megatron.tensor_parallel import ParallelLinear
from jobs.profiles.ranges import profile_range
from jobs.weights.nf4 import Nf4


class PrefetchedTransposes:
    """`FrozenWeights` in FP8 on a GPU. `linears` are in the order of the backward pass.

    In another order the weights are still correct, but their transposes do not overlap with GEMMs.

    stored: returns the FP8 weight of a linear.
    """

    def __init__(
        self,
        linears: Sequence[ParallelLinear],
        transpose: Callable[[Quantized, torch.Tensor], Quantized],
        stored: Callable[[ParallelLinear], Quantized] = attrgetter("quantized"),
    ) -> None:
        self.transpose, self.stored = transpose, stored
        self.next_linear = dict(zip(linears, [*linears[1:], None], strict=True))
        self.stream = torch.cuda.Stream()
        size = max(linear.weight.numel() for linear in linears)
        self.buffers = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.linear_in_buffer: list[ParallelLinear | None] = [None, None]
        self.transposed = [torch.cuda.Event(), torch.cuda.Event()]
        self.next_buffer = 0

    def forward(self, linear: ParallelLinear) -> Quantized:
        return self.stored(linear)

    def backward(self, linear: ParallelLinear) -> Quantized:
        """Return a linear's transposed weight, and start to transpose the weight of the next linear."""
        if linear not in self.linear_in_buffer:
            self._start(linear)
        buffer = self.linear_in_buffer.index(linear)
        self.transposed[buffer].wait()
        self.linear_in_buffer[buffer] = None
        weight = self._view(linear, buffer)
        next_linear = self.next_linear[linear]
        if next_linear is not None:
            self.next_buffer = 1 - buffer
            self._start(next_linear)
        return weight

    def _start(self, linear: ParallelLinear) -> None:
        """Transpose into the next buffer, after the GEMMs that were launched so far have read it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with profile_range(Part.weights), torch.cuda.stream(self.stream):
            self.transpose(self.stored(linear), self.buffers[self.next_buffer][: linear.weight.numel()])
            self.transposed[self.next_buffer].record()
        self.linear_in_buffer[self.next_buffer] = linear
        self.next_buffer = 1 - self.next_buffer

    def _view(self, linear: ParallelLinear, buffer: int) -> Quantized:
        weight = self.stored(linear)
        values = self.buffers[buffer][: weight.values.numel()].view(weight.values.T.shape)
        return Quantized(values.view(weight.values.dtype), weight.scale)

    def join(self) -> None:
        """Let the current stream wait for prefetched transposes, and drop them."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.invalidate()

    def invalidate(self) -> None:
        """Drop prefetched transposes after the weights have changed."""
        self.linear_in_buffer = [None, None]


class Unquantized:
    """`FrozenWeights` or `LinearWeights` without copies: cuBLAS reads the transposed view as fast as the weight."""

    def forward(self, linear: ParallelLinear) -> Quantized:
        return Quantized(linear.weight, None)

    def backward(self, linear: ParallelLinear) -> Quantized:
        return Quantized(linear.weight.T, None)

    def refresh(self, linears: Sequence[ParallelLinear] | None = None) -> None:
        """Do nothing: there are no copies."""


class QuantizedLinear(Protocol):
    """A linear whose weight is stored in FP8, or can be quantised to it."""

    @property
    def quantized(self) -> Quantized:
        """The weight [O, I] of this TP rank."""


class Nf4Linear(Protocol):
    """A linear whose weight is stored in 4 bits."""

    @property
    def shape(self) -> tuple[int, int]:
        """O and I of this TP rank."""

    @property
    def nf4(self) -> Nf4:
        """The weight of this TP rank."""


class DequantizedWeights:
    """`FrozenWeights` in NF4 on a GPU. It prefetches the weight that followed this request the last time.

    If another weight is requested, it is still correct, but the GEMM waits for it.
    """

    def __init__(self, linears: Sequence[Nf4Linear], dequantize: Callable[[Nf4, Tensor], Tensor]) -> None:
        self.dequantize = dequantize
        self.stream = torch.cuda.Stream()
        size = max(linear.shape[0] * linear.shape[1] for linear in linears)
        self.buffers = [torch.empty(size, dtype=BF16, device=torch.cuda.current_device()) for _ in range(2)]
        self.absmax_of_buffer: list[Tensor | None] = [None, None]
        self.dequantized = [torch.cuda.Event(), torch.cuda.Event()]
        self.buffer_in_use = 0
        self.previous: tuple[str, Nf4Linear] | None = None
        self.followers: dict[tuple[str, Nf4Linear], Nf4Linear] = {}

    def forward(self, linear: Nf4Linear) -> Quantized:
        return Quantized(self._get("forward", linear), None)

    def backward(self, linear: Nf4Linear) -> Quantized:
        return Quantized(self._get("backward", linear).T, None)

    def _get(self, direction: str, linear: Nf4Linear) -> Tensor:
        """Return the weight [O, I], and start to dequantise the one that is expected next."""
        self._record_order(direction, linear)
        self.buffer_in_use = buffer = self._dequantize(linear)
        self.dequantized[buffer].wait()
        follower = self.followers.get((direction, linear))
        if follower is not None:
            self._dequantize(follower)
        num_out, num_in = linear.shape
        return self.buffers[buffer][: num_out * num_in].view(num_out, num_in)

    def _record_order(self, direction: str, linear: Nf4Linear) -> None:
        if self.previous is not None and self.previous[1] is not linear:  # a recomputed linear is requested twice
            self.followers[self.previous] = linear
        self.previous = direction, linear

    def _dequantize(self, linear: Nf4Linear) -> int:
        """Return the buffer of the dequantised weight; dequantise it if no buffer has it.

        The weight is dequantised into the buffer that is not in use, after the GEMMs that were launched so far have
        read it. A buffer is identified by the absmax tensor of its weight, which changes when a checkpoint is loaded.
        """
        weight = linear.nf4
        for buffer, absmax in enumerate(self.absmax_of_buffer):
            if absmax is weight.absmax:
                return buffer
        buffer = 1 - self.buffer_in_use
        self.stream.wait_stream(torch.cuda.current_stream())
        with profile_range(Part.weights), torch.cuda.stream(self.stream):
            self.dequantize(weight, self.buffers[buffer])
            self.dequantized[buffer].record()
        self.absmax_of_buffer[buffer] = weight.absmax
        return buffer

    def join(self) -> None:
        """Let the current stream wait for prefetched weights, and drop them."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.invalidate()

    def invalidate(self) -> None:
        """Drop the contents of the buffers: a replayed graph has overwritten them."""
        self.absmax_of_buffer = [None, None]
