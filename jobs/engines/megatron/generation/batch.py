"""Answer a batch of requests: the host launches what the schedule says, and reads tokens when all of it is launched."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import torch
from torch import Tensor

from jobs.engines.generation import Answer, Request
from jobs.engines.megatron import graphs
from jobs.engines.megatron.generation.forward import Decoder, Prompts, prefill, step
from jobs.engines.megatron.generation.kv_cache import Slots


class Arrival:
    """A copy of a tensor in the host's memory, which may still be under way, and when it was complete."""

    def __init__(self, x: Tensor) -> None:
        if not x.is_cuda:
            self.copy, self.event, self.time_s = x.clone(), None, time.perf_counter()
            return
        self.copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.copy.copy_(x, non_blocking=True)
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_after(self, start: "Start") -> float:
        """Return how long after the start it was complete; the device has finished all of its work."""
        if self.event is None:
            return self.time_s - start.time_s
        milliseconds: float = start.event.elapsed_time(self.event)
        return milliseconds / 1000


class Start:
    """Now; the device has nothing to do."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.time_s = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Begin:
    """Answers begin, each with its prompt and its first token."""

    slots: dict[int, int]
    """The slot of each answer, by its index."""


@dataclass(frozen=True, slots=True)
class Advance:
    """The first slots, among them all with an answer under way, get so many more tokens."""

    num_steps: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Answers are complete, and their slots are free."""

    slots: dict[int, int]


Action = Begin | Advance | Finish


def schedule(lengths: Sequence[int], num_slots: int, *, is_continuous: bool) -> Iterator[Action]:
    """Yield what is done for answers of these lengths. The longest start first, so that those of a batch are alike.

    is_continuous: a free slot is given to the next request at once; otherwise when all slots are free.
    """
    waiting = deque(sorted(range(len(lengths)), key=lambda index: -lengths[index]))
    missing, slot_of = dict[int, int](), dict[int, int]()
    while waiting or missing:
        free = [slot for slot in range(num_slots) if slot not in slot_of.values()]
        if waiting and free and (is_continuous or not missing):
            starting = {waiting.popleft(): slot for slot in free[: len(waiting)]}
            missing |= {index: lengths[index] - 1 for index in starting}
            slot_of |= starting
            yield Begin(starting)
        elif num_steps := min(missing.values()):
            missing = {index: left - num_steps for index, left in missing.items()}
            yield Advance(num_steps, 1 + max(slot_of.values()))
        done = {index: slot_of.pop(index) for index, left in missing.items() if left == 0}
        if done:
            missing = {index: left for index, left in missing.items() if left}
            yield Finish(done)


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


PREFILLED_TOKENS = 16384
"""Of the prompts that pass through the model together, with their padding; more would only need more memory."""
_REHEARSED_STEPS = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """What answers requests side by side, as many as there are slots."""

    slots: Slots
    steps: Mapping[int, Callable[[], None]]
    """What appends a token to each of the first slots, by their number."""
    prefills: Prefills
    is_continuous: bool

    def rehearse(self, requests: Sequence[Request]) -> None:
        """Do what `answers` does with all prompts, but with few steps between them."""
        self.answers(requests, seed=0, most_steps=_REHEARSED_STEPS)

    def answers(self, requests: Sequence[Request], *, seed: int, most_steps: int | None = None) -> list[Answer]:
        """Return the answers in the order of the requests.

        most_steps: take no more steps at once, whatever the tokens then are; None: as many as it takes.
        """
        start = Start(self.slots.tokens_B.device)
        found, prefill = _Arrivals(), self.prefills if most_steps is None else self.prefills.rehearse
        lengths, num_slots = [request.length for request in requests], len(self.slots.tokens_B)
        for action in schedule(lengths, num_slots, is_continuous=self.is_continuous):
            if isinstance(action, Advance):
                step = self.steps[min(number for number in self.steps if number >= action.num_slots)]
                for _ in range(min(action.num_steps, most_steps or action.num_steps)):
                    step()
            elif isinstance(action, Begin):
                found.first |= self._begin(requests, action.slots, seed, prefill)
            else:
                self._finish(requests, action.slots, found)
        return found.answers(start, len(requests))

    def _begin(
        self, requests: Sequence[Request], slot_of: dict[int, int], seed: int, prefill: Callable[[Prompts], Tensor]
    ) -> dict[int, Arrival]:
        """Take prompts into their slots; return when the first token of each arrives."""
        longest = max(len(requests[index].prompt) for index in slot_of)
        indices, most, first = list(slot_of), max(1, PREFILLED_TOKENS // longest), dict[int, Arrival]()
        for some in (indices[i : i + most] for i in range(0, len(indices), most)):
            prompts = self._prompts([requests[index].prompt for index in some], [slot_of[i] for i in some], seed, some)
            first |= dict.fromkeys(some, Arrival(prefill(prompts)))
        return first

    def _prompts(
        self, rows: Sequence[tuple[int, ...]], slots: Sequence[int], seed: int, indices: Sequence[int]
    ) -> Prompts:
        longest = max(map(len, rows))
        padded = [[*row, *(0 for _ in range(longest - len(row)))] for row in rows]
        seeds = [(seed + index) % 2**31 for index in indices]
        numbers = self._on_device([[len(row) for row in rows], slots, seeds])
        return Prompts(self._on_device(padded).T.contiguous(), *numbers)

    def _on_device(self, numbers: Sequence[Sequence[int]]) -> Tensor:
        device = self.slots.tokens_B.device
        host = torch.tensor(numbers, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    def _finish(self, requests: Sequence[Request], slot_of: dict[int, int], found: "_Arrivals") -> None:
        for index, slot in slot_of.items():
            begin = len(requests[index].prompt)
            found.rows[index] = Arrival(self.slots.rows_BT[slot, begin : begin + requests[index].length])
        self.slots.leave(self._on_device([list(slot_of.values())])[0])


@dataclass(slots=True)
class _Arrivals:
    """The first tokens and the whole answers, by the index of their request."""

    first: dict[int, Arrival] = field(default_factory=dict)
    rows: dict[int, Arrival] = field(default_factory=dict)

    def answers(self, start: Start, num_requests: int) -> list[Answer]:
        """Return the answers, once the device has finished."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [
            Answer(
                tuple(self.rows[index].copy.tolist()),
                self.first[index].seconds_after(start),
                self.rows[index].seconds_after(start),
            )
            for index in range(num_requests)
        ]
