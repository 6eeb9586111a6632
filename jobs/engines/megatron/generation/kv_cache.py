"""What the answers under way have on the device: keys and values in memory that never moves, and their last tokens.

A slot holds one answer. A captured step reads and writes these tensors in place, so that no number of it comes from the
host. What a former answer left behind in a slot is never read: an answer attends up to its own position alone.

Shape letters: B slots, G key/value groups of this TP rank, T tokens that a slot has room for, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROOM = 64
"""Tokens that T is a multiple of."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a batch."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    """Of each layer, [B, G, T, D]."""
    tokens_B: Tensor
    """The newest token of each answer, whose keys and values are not there yet."""
    positions_B: Tensor
    """Where it stands in its row."""
    rows_BT: Tensor
    """All new tokens, each at its position."""
    seeds_B: Tensor
    """Of the noise by which tokens are drawn."""

    @property
    def room(self) -> int:
        """Return T."""
        return self.rows_BT.shape[1]

    def first(self, num_slots: int) -> "Slots":
        """Return the first so many slots, in the same memory."""
        keys, values = ([cache[:num_slots] for cache in of_layers] for of_layers in (self.keys, self.values))
        numbers = (self.tokens_B, self.positions_B, self.rows_BT, self.seeds_B)
        return Slots(keys, values, *(of_slots[:num_slots] for of_slots in numbers))

    def append(self, tokens_B: Tensor) -> None:
        """Take the next token of every slot. One whose row is full writes its last place again."""
        self.positions_B.add_(1).clamp_(max=self.room - 1)
        self.rows_BT.scatter_(1, self.positions_B[:, None], tokens_B[:, None])
        self.tokens_B.copy_(tokens_B)

    def start(self, slots: Tensor, tokens: Tensor, positions: Tensor, seeds: Tensor) -> None:
        """Take the first token of new answers into some of the slots."""
        self.tokens_B[slots], self.positions_B[slots], self.seeds_B[slots] = tokens, positions, seeds
        self.rows_BT[slots, positions] = tokens

    def leave(self, slots: Tensor) -> None:
        """Give slots back: until the next answer each of them attends to as little as it can."""
        self.positions_B.index_fill_(0, slots, 0)


def empty(num_slots: int, room: int, *, layers: int, groups: int, dim: int, like: Tensor) -> Slots:
    """Return slots for rows of `room` tokens or a few more, in the dtype and on the device of `like`."""
    room = -(-room // _ROOM) * _ROOM

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=like.device)

    def cache() -> list[Tensor]:
        return [like.new_zeros(num_slots, groups, room, dim) for _ in range(layers)]

    numbers = [zeros(num_slots), zeros(num_slots), zeros(num_slots, room), zeros(num_slots)]
    return Slots(cache(), cache(), *numbers)
