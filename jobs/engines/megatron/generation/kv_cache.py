"""The static KV cache: keys, values and newest token of each running request, in device memory that is never moved.

A slot holds one answer. A captured decode step reads and writes these tensors in place, without values from the host.
Data of a former answer in a slot is never read: an answer attends only up to its own position.

Shape letters: B slots, G key/value groups of this TP rank, T capacity of a slot in tokens, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CAPACITY_MULTIPLE = 64
"""T is a multiple of this."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of a batch of slots, with the tokens generated so far."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    """One tensor [B, G, T, D] per layer."""
    tokens_B: Tensor
    """The newest token of each answer; its keys and values are not in the cache yet."""
    positions_B: Tensor
    """The position of the newest token."""
    rows_BT: Tensor
    """All new tokens, each at its position."""
    seeds_B: Tensor
    """The seeds of sampling."""

    @property
    def capacity(self) -> int:
        """The capacity T of a slot in tokens."""
        return self.rows_BT.shape[1]

    def first(self, num_slots: int) -> "KvCache":
        """Return the first `num_slots` slots as a view."""
        keys, values = ([layer[:num_slots] for layer in layers] for layers in (self.keys, self.values))
        others = (self.tokens_B, self.positions_B, self.rows_BT, self.seeds_B)
        return KvCache(keys, values, *(tensor[:num_slots] for tensor in others))

    def append(self, tokens_B: Tensor) -> None:
        """Append the next token of every slot. A full slot overwrites its last token."""
        self.positions_B.add_(1).clamp_(max=self.capacity - 1)
        self.rows_BT.scatter_(1, self.positions_B[:, None], tokens_B[:, None])
        self.tokens_B.copy_(tokens_B)

    def start(self, slots: Tensor, tokens: Tensor, positions: Tensor, seeds: Tensor) -> None:
        """Start new answers in some of the slots, with their first tokens."""
        self.tokens_B[slots], self.positions_B[slots], self.seeds_B[slots] = tokens, positions, seeds
        self.rows_BT[slots, positions] = tokens

    def free(self, slots: Tensor) -> None:
        """Free slots: position 0 makes their attention as short as possible until the next answer."""
        self.positions_B.index_fill_(0, slots, 0)


def empty(num_slots: int, capacity: int, *, layers: int, groups: int, dim: int, like: Tensor) -> KvCache:
    """Return an empty cache with at least `capacity` tokens per slot, with data type and device of `like`."""
    capacity = -(-capacity // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=like.device)

    def cache() -> list[Tensor]:
        return [like.new_zeros(num_slots, groups, capacity, dim) for _ in range(layers)]

    others = [zeros(num_slots), zeros(num_slots), zeros(num_slots, capacity), zeros(num_slots)]
    return KvCache(cache(), cache(), *others)
