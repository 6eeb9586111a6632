"""Steps whose kernels one CUDA graph launches; on a CPU they are the same steps without a graph."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from jobs.engines.megatron import graphs
from jobs.engines.megatron.generation.forward import Decoder, step
from jobs.engines.megatron.generation.slots import Slots

FEWER_SLOTS = (32, 16, 1)
"""Towards the end of a batch fewer slots are in use. Kernels take rows by sixteens, and have one for a single row."""


def steps(decoder: Decoder, slots: Slots, angles_TD: Tensor) -> Mapping[int, Callable[[], None]]:
    """Return what appends a token to each of the first slots, by their number: all of them, and fewer."""
    numbers = [len(slots.tokens_B), *(number for number in FEWER_SLOTS if number < len(slots.tokens_B))]
    return {number: _step(decoder, slots.first(number), angles_TD) for number in numbers}


def _step(decoder: Decoder, slots: Slots, angles_TD: Tensor) -> Callable[[], None]:
    """Return what appends a token to every slot.

    The first step compiles the kernels, and creates the communicators of TP; the second one is captured.
    """
    run = partial(step, decoder, slots, angles_TD)
    if not slots.tokens_B.is_cuda:
        return run

    def captured_step() -> Tensor:
        run()
        return slots.tokens_B

    run()
    torch.cuda.synchronize()
    replay, _ = graphs.captured(captured_step)
    slots.leave(torch.arange(len(slots.tokens_B), device=slots.tokens_B.device))
    return replay
