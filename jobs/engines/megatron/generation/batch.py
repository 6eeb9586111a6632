"""Answer a batch of requests: the host launches what the schedule says, and reads tokens when all of it is launched."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jobs.engines.generation import Answer, Request
from jobs.engines.megatron.generation.captured import Prefills
from jobs.engines.megatron.generation.clock import Arrival, Start
from jobs.engines.megatron.generation.forward import Prompts
from jobs.engines.megatron.generation.schedule import Advance, Begin, schedule
from jobs.engines.megatron.generation.slots import Slots

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
