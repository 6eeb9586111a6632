"""Steps and passes of prompts whose kernels one CUDA graph launches; on a CPU they are the same without a graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch import Tensor

from jobs.engines.megatron import graphs
from jobs.engines.megatron.generation.forward import Decoder, Prompts, prefill, step
from jobs.engines.megatron.generation.slots import Slots

FEWER_SLOTS = (32, 16, 1)
"""Towards the end of a batch fewer slots are in use. Kernels take rows by sixteens, and have one for a single row."""
MOST_PROMPT_TOKENS = 2048
"""Of a captured pass, with its padding; longer ones do not wait for the host, and would keep more memory."""
_MOST_SHAPES = 32


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


def prefills(decoder: Decoder, slots: Slots, angles_TD: Tensor) -> "Prefills":
    """Return what takes prompts into slots. Passes with the collectives of TP are not captured: no GPU has tried it."""
    is_captured = slots.tokens_B.is_cuda and decoder.ranks.size == 1
    return Prefills(partial(prefill, decoder, slots, angles_TD), is_captured)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A captured pass: the prompts that it reads, what launches it, and the first tokens that it writes."""

    prompts: Prompts
    replay: Callable[[], None]
    tokens_B: Tensor


@dataclass(slots=True)
class Prefills:
    """Passes of prompts through the model. Short ones wait for the host, so those of a rehearsed shape are captured."""

    run: Callable[[Prompts], Tensor]
    is_captured: bool
    passes: dict[torch.Size, _Pass] = field(default_factory=dict)
    pool: graphs.Pool | None = None

    def __call__(self, prompts: Prompts) -> Tensor:
        """Return the first new token of each prompt [B], which stays as it is until the next pass."""
        known = self.passes.get(prompts.tokens_SB.shape)
        if known is None:
            return self.run(prompts)
        for part in fields(Prompts):
            getattr(known.prompts, part.name).copy_(getattr(prompts, part.name))
        known.replay()
        return known.tokens_B

    def rehearse(self, prompts: Prompts) -> Tensor:
        """Return the same without a graph, which compiles the kernels; then capture this shape, if there is use in it.

        All graphs share their memory: they run one after the other.
        """
        tokens_B, shape = self.run(prompts), prompts.tokens_SB.shape
        is_wanted = shape.numel() <= MOST_PROMPT_TOKENS and shape not in self.passes and len(self.passes) < _MOST_SHAPES
        if self.is_captured and is_wanted:
            held = Prompts(*(getattr(prompts, part.name).clone() for part in fields(Prompts)))
            torch.cuda.synchronize()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            replay, written_B = graphs.captured(partial(self.run, held), self.pool)
            self.passes[shape] = _Pass(held, replay, written_B)
        return tokens_B
