"""Ranks as threads of this process: their collectives are fakes that exchange tensors at a barrier."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

T = TypeVar("T")


class Group:
    """A fake process group of one rank."""

    def __init__(self, rank: int, slots: list[Any], barrier: Barrier) -> None:
        self._rank, self._slots, self._barrier = rank, slots, barrier

    def size(self) -> int:
        return len(self._slots)

    def rank(self) -> int:
        return self._rank

    def exchange(self, mine: Any) -> list[Any]:
        """Return the values of all ranks. Of a tensor this is a copy."""
        self._slots[self._rank] = mine.clone() if isinstance(mine, Tensor) else mine
        self._barrier.wait()
        everyones = list(self._slots)
        self._barrier.wait()
        return everyones

    def abort(self) -> None:
        """End the waits of all ranks, now and later."""
        self._barrier.abort()


def groups(size: int) -> list[Group]:
    """Return the group of each rank."""
    slots, barrier = [None] * size, Barrier(size, timeout=60)
    return [Group(rank, slots, barrier) for rank in range(size)]


def run(size: int, of_rank: Callable[[Group], T]) -> list[T]:
    """Return what the function returns for the group of each rank.

    If it fails on a rank, the others wait no longer, and its error is raised.
    """

    def call(group: Group) -> T:
        try:
            return of_rank(group)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(call, group) for group in groups(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]


def install(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's collectives; results of asynchronous ones arrive when they are waited for. Return their names."""
    names: list[str] = []

    def done(name: str, out: Tensor, result: Tensor, async_op: bool) -> Any:
        names.append(f"{name} async" if async_op else name)
        if not async_op:
            out.copy_(result)
            return None
        out.fill_(torch.nan if out.is_floating_point() else 0)
        return SimpleNamespace(wait=lambda: out.copy_(result))

    def all_gather(out: Tensor, mine: Tensor, group: Group, async_op: bool = False) -> Any:
        assert mine.is_contiguous()
        return done("all_gather", out, torch.cat(group.exchange(mine)), async_op)

    def reduce_scatter(out: Tensor, mine: Tensor, group: Group, async_op: bool = False) -> Any:
        assert mine.is_contiguous()
        total = sum(x.chunk(group.size())[group.rank()] for x in group.exchange(mine))
        return done("reduce_scatter", out, total, async_op)

    def all_reduce(
        x: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        parts = torch.stack(group.exchange(x))
        result = parts.amax(0) if op == torch.distributed.ReduceOp.MAX else parts.sum(0)
        return done("all_reduce", x, result, async_op)

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", reduce_scatter)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return names
