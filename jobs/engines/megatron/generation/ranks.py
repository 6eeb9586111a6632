"""The TP ranks of a replica, and their collectives during generation."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class OneRank:
    """A substitute for a process group of one rank, if no process group exists."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


class Ranks:
    """The TP ranks of a replica. Without a group there is only this rank."""

    def __init__(self, group: ProcessGroup | OneRank | None = None) -> None:
        self.group = group or OneRank()
        self.size, self.rank = self.group.size(), self.group.rank()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(x, group=self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in a new first dimension."""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size * len(x), *x.shape[1:])
        torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=self.group)
        return out.view(self.size, *x.shape)

    def gather_columns(self, x_BV: Tensor) -> Tensor:
        """Return the columns of all ranks, concatenated."""
        return x_BV if self.size == 1 else self.gather(x_BV).movedim(0, 1).flatten(1)
