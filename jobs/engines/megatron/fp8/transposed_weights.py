"""Transposed weights for the GEMMs of the backward pass, each computed while the previous GEMM runs.

GPU memory does not hold all of them at once. Two buffers alternate, and the transposes run on a stream of their own.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch

from bench.contract.modules import Part
from jobs.engines.megatron.fp8.quantize import Quantized
from jobs.profiles.ranges import named


class PrefetchedTransposes:
    """`FrozenWeights` in FP8 on a GPU, for linears whose backward pass has the order in which they are passed.

    In another order the weights are right too, but their transposes do not overlap with GEMMs.

    stored: returns the weight of a linear in FP8.
    """

    def __init__(
        self,
        linears: Sequence[torch.nn.Module],
        transpose: Callable[[Quantized, torch.Tensor], Quantized],
        stored: Callable[[torch.nn.Module], Quantized] = attrgetter("quantized"),
    ) -> None:
        self.transpose, self.stored = transpose, stored
        self.next_linear = dict(zip(linears, [*linears[1:], None], strict=True))
        self.stream = torch.cuda.Stream()
        size = max(linear.weight.numel() for linear in linears)
        self.buffers = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.linear_in_buffer: list[torch.nn.Module | None] = [None, None]
        self.transposed = [torch.cuda.Event(), torch.cuda.Event()]
        self.next_buffer = 0

    def forward(self, linear: torch.nn.Module) -> Quantized:
        return self.stored(linear)

    def backward(self, linear: torch.nn.Module) -> Quantized:
        """Return a linear's transposed weight and start to transpose the next linear's."""
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

    def _start(self, linear: torch.nn.Module) -> None:
        """Transpose into the next buffer, once the GEMMs that were launched so far have read it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with named(Part.weights), torch.cuda.stream(self.stream):
            self.transpose(self.stored(linear), self.buffers[self.next_buffer][: linear.weight.numel()])
            self.transposed[self.next_buffer].record()
        self.linear_in_buffer[self.next_buffer] = linear
        self.next_buffer = 1 - self.next_buffer

    def _view(self, linear: torch.nn.Module, buffer: int) -> Quantized:
        weight = self.stored(linear)
        values = self.buffers[buffer][: weight.values.numel()].view(weight.values.T.shape)
        return Quantized(values.view(weight.values.dtype), weight.scale)

    def join(self) -> None:
        """Let the current stream wait for what was transposed ahead, and forget it."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.forget()

    def forget(self) -> None:
        """Follow a change of the weights: what was transposed ahead is done again."""
        self.linear_in_buffer = [None, None]
