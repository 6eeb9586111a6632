"""Generate answers to a batch of requests: the host launches the whole schedule, and reads the tokens afterwards."""

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
from jobs.engines.megatron.generation.kv_cache import KvCache


class HostCopy:
    """An asynchronous copy of a tensor to host memory, and the time of its completion."""

    def __init__(self, x: Tensor) -> None:
        if not x.is_cuda:
            self.copy, self.event, self.time_s = x.clone(), None, time.perf_counter()
            return
        self.copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self.copy.copy_(x, non_blocking=True)
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_after(self, start: "StartTime") -> float:
        """Return the seconds from the start to the completion of the copy. The device must be synchronized."""
        if self.event is None:
            return self.time_s - start.time_s
        milliseconds: float = start.event.elapsed_time(self.event)
        return milliseconds / 1000


class StartTime:
    """The current time, with an idle device."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()
        self.time_s = time.perf_counter()


@dataclass(frozen=True, slots=True)
class Begin:
    """Prefill the prompts of these answers and sample their first tokens."""

    slots: dict[int, int]
    """The slot of each answer, by the index of its request."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Run decode steps on the first `num_slots` slots, which include all active ones."""

    num_steps: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Finish:
    """These answers are complete; free their slots."""

    slots: dict[int, int]


Action = Begin | Advance | Finish


def schedule(lengths: Sequence[int], num_slots: int, *, is_continuous: bool) -> Iterator[Action]:
    """Yield the actions for answers of these lengths. The longest start first, so that a batch has similar lengths.

    is_continuous: a free slot gets the next request at once; otherwise only when all slots are free.
    """
    waiting = deque(sorted(range(len(lengths)), key=lambda index: -lengths[index]))
    remaining, slot_of = dict[int, int](), dict[int, int]()
    while waiting or remaining:
        free = [slot for slot in range(num_slots) if slot not in slot_of.values()]
        if waiting and free and (is_continuous or not remaining):
            starting = {waiting.popleft(): slot for slot in free[: len(waiting)]}
            remaining |= {index: lengths[index] - 1 for index in starting}
            slot_of |= starting
            yield Begin(starting)
        elif num_steps := min(remaining.values()):
            remaining = {index: left - num_steps for index, left in remaining.items()}
            yield Advance(num_steps, 1 + max(slot_of.values()))
        done = {index: slot_of.pop(index) for index, left in remaining.items() if left == 0}
        if done:
            remaining = {index: left for index, left in remaining.items() if left}
            yield Finish(done)


FEWER_SLOTS = (32, 16, 1)
"""Smaller numbers of slots, for the end of a batch. Kernels process 16 rows at once; one row has its own kernel."""
MOST_PROMPT_TOKENS = 2048
"""Maximum tokens of a captured prefill, padding included. Longer prefills are not bound by the host."""
_MOST_SHAPES = 32


def decode_steps(decoder: Decoder, cache: KvCache, angles_TD: Tensor) -> Mapping[int, Callable[[], None]]:
    """Return the decode step for each number of slots: all slots, and fewer."""
    numbers = [len(cache.tokens_B), *(number for number in FEWER_SLOTS if number < len(cache.tokens_B))]
    return {number: _step(decoder, cache.first(number), angles_TD) for number in numbers}


def _step(decoder: Decoder, cache: KvCache, angles_TD: Tensor) -> Callable[[], None]:
    """Return the decode step, which appends a token to every slot.

    The first step compiles the kernels and creates the communicators of TP; the second step is captured.
    """
    run = partial(step, decoder, cache, angles_TD)
    if not cache.tokens_B.is_cuda:
        return run

    def captured_step() -> Tensor:
        run()
        return cache.tokens_B

    run()
    torch.cuda.synchronize()
    replay, _ = graphs.capture(captured_step)
    cache.free(torch.arange(len(cache.tokens_B), device=cache.tokens_B.device))
    return replay


def prefills(decoder: Decoder, cache: KvCache, angles_TD: Tensor) -> "Prefills":
    """Return the prefill of prompts."""
    return Prefills(partial(prefill, decoder, cache, angles_TD), is_captured=cache.tokens_B.is_cuda)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A captured prefill: the prompts that it reads, its replay function, and the first tokens that it writes."""

    prompts: Prompts
    replay: Callable[[], None]
    tokens_B: Tensor


@dataclass(slots=True)
class Prefills:
    """Prefills prompts. Short prefills are bound by the host, so the shapes of the warm-up are captured."""

    run: Callable[[Prompts], Tensor]
    is_captured: bool
    passes: dict[torch.Size, _Pass] = field(default_factory=dict)
    pool: graphs.Pool | None = None

    def __call__(self, prompts: Prompts) -> Tensor:
        """Return the first new token of each prompt [B]; the tensor is valid until the next prefill."""
        captured = self.passes.get(prompts.tokens_SB.shape)
        if captured is None:
            return self.run(prompts)
        for part in fields(Prompts):
            getattr(captured.prompts, part.name).copy_(getattr(prompts, part.name))
        captured.replay()
        return captured.tokens_B

    def warm_up(self, prompts: Prompts) -> Tensor:
        """Prefill without a graph, which compiles the kernels; then capture this shape if it is small enough.

        All graphs share their memory, because they run one after another.
        """
        tokens_B, shape = self.run(prompts), prompts.tokens_SB.shape
        is_small = shape.numel() <= MOST_PROMPT_TOKENS and shape not in self.passes and len(self.passes) < _MOST_SHAPES
        if self.is_captured and is_small:
            static = Prompts(*(getattr(prompts, part.name).clone() for part in fields(Prompts)))
            torch.cuda.synchronize()
            self.pool = self.pool or torch.cuda.graph_pool_handle()
            replay, written_B = graphs.capture(partial(self.run, static), self.pool)
            self.passes[shape] = _Pass(static, replay, written_B)
        return tokens_B


PREFILLED_TOKENS = 16384
"""Maximum tokens of one prefill, padding included; more tokens would only need more memory."""
_WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Batch:
    """Generates answers concurrently, one per slot."""

    cache: KvCache
    steps: Mapping[int, Callable[[], None]]
    """The decode step for each number of slots."""
    prefills: Prefills
    is_continuous: bool

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Run `generate` with all prompts, but with few decode steps."""
        self.generate(requests, seed=0, most_steps=_WARMUP_STEPS)

    def generate(self, requests: Sequence[Request], *, seed: int, most_steps: int | None = None) -> list[Answer]:
        """Return the answers in the order of the requests.

        most_steps: the maximum number of consecutive decode steps, for a warm-up; None: no limit.
        """
        start = StartTime(self.cache.tokens_B.device)
        copies, prefill = _AnswerCopies(), self.prefills if most_steps is None else self.prefills.warm_up
        lengths, num_slots = [request.length for request in requests], len(self.cache.tokens_B)
        for action in schedule(lengths, num_slots, is_continuous=self.is_continuous):
            if isinstance(action, Advance):
                step = self.steps[min(number for number in self.steps if number >= action.num_slots)]
                for _ in range(min(action.num_steps, most_steps or action.num_steps)):
                    step()
            elif isinstance(action, Begin):
                copies.first |= self._begin(requests, action.slots, seed, prefill)
            else:
                self._finish(requests, action.slots, copies)
        return copies.answers(start, len(requests))

    def _begin(
        self, requests: Sequence[Request], slot_of: dict[int, int], seed: int, prefill: Callable[[Prompts], Tensor]
    ) -> dict[int, HostCopy]:
        """Prefill prompts into their slots; return the copies of their first tokens to the host."""
        longest = max(len(requests[index].prompt) for index in slot_of)
        indices, batch_size, first = list(slot_of), max(1, PREFILLED_TOKENS // longest), dict[int, HostCopy]()
        for part in (indices[i : i + batch_size] for i in range(0, len(indices), batch_size)):
            prompts = self._prompts([requests[index].prompt for index in part], [slot_of[i] for i in part], seed, part)
            first |= dict.fromkeys(part, HostCopy(prefill(prompts)))
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
        device = self.cache.tokens_B.device
        host = torch.tensor(numbers, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    def _finish(self, requests: Sequence[Request], slot_of: dict[int, int], copies: "_AnswerCopies") -> None:
        for index, slot in slot_of.items():
            begin = len(requests[index].prompt)
            copies.rows[index] = HostCopy(self.cache.rows_BT[slot, begin : begin + requests[index].length])
        self.cache.free(self._on_device([list(slot_of.values())])[0])


@dataclass(slots=True)
class _AnswerCopies:
    """Host copies of the first tokens and of the complete answers, by the index of their request."""

    first: dict[int, HostCopy] = field(default_factory=dict)
    rows: dict[int, HostCopy] = field(default_factory=dict)

    def answers(self, start: StartTime, num_requests: int) -> list[Answer]:
        """Wait for the device, and return the answers."""
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
