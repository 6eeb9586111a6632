"""Which answer is worked on when: known before anything runs, because every answer has exactly the length asked for."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
