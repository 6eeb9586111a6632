"""A step whose kernels one CUDA graph launches; on a CPU it is the same step without a graph."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from jobs.engines.megatron import graphs
from jobs.engines.megatron.generation.forward import Decoder, step
from jobs.engines.megatron.generation.slots import Slots


def advance(decoder: Decoder, slots: Slots, angles_TD: Tensor) -> Callable[[], None]:
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
