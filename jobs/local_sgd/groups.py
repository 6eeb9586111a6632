"""The groups of ranks that train apart: which one this rank is of, and the store through which all of them talk.

Each group is a process group of torch's own, so that no collective of the training ever leaves it. Groups meet in a
store that rank 0 keeps, and where they are merged (`jobs.local_sgd.merging`).
"""

import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bench.contract.plan import Plan
from bench.contract.run_files import LIFE_VARIABLE
from jobs.ranks.identity import Rank

if TYPE_CHECKING:
    from torch.distributed import Store

LONG, SHORT = timedelta(days=1), timedelta(minutes=10)
"""For what only the end of rank 0 can keep from coming, which closes the connection; and for what others tell."""


@dataclass(slots=True)
class Groups:
    """All groups, as one rank sees them. Ranks have the numbers that the launcher gave them."""

    store: "Store"
    rank: int
    number: int
    """Of this rank's group."""
    size: int
    """Ranks of a group."""
    count: int
    """Groups at the start."""
    living: list[int]
    """The groups that train, the same on all of their ranks."""
    life: int = 0
    """How often this rank's group was started again in this attempt at the trial."""
    let_in: dict[int, int] = field(default_factory=dict, init=False)
    """On rank 0: the life in which a group that was started again was let in."""
    _gathered: int = field(default=0, init=False)

    @property
    def position(self) -> int:
        """This rank's number in its group."""
        return self.rank % self.size

    @property
    def ranks(self) -> range:
        """The ranks of this rank's group."""
        return self.of(self.number)

    def of(self, number: int) -> range:
        """Return the ranks of a group."""
        return range(number * self.size, (number + 1) * self.size)

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank gives, all of which call this together; None of those that are gone or too late.

        It waits no longer than SHORT for all of them together.
        """
        from torch.distributed import DistStoreError

        self._gathered += 1
        name = f"gathered/{self._gathered}"
        self.tell(f"{name}/{self.rank}", value)
        keys = {rank: f"{name}/{rank}" for group in self.living for rank in self.of(group)}
        with suppress(DistStoreError):  # the time is up
            self.store.wait(list(keys.values()), SHORT)
        values: list[Any] = [None] * (self.size * self.count)
        for rank, key in keys.items():
            if self.store.check([key]):
                values[rank] = self.told(key)
        return values

    def tell(self, key: str, value: Any) -> None:
        """Let the other ranks know something, once for each key."""
        self.store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # torch's stub knows no bytes

    def told(self, key: str, limit: timedelta | None = None, store: "Store | None" = None) -> Any:
        """Return what some rank tells under a key, once it has; by a store of its own for another thread."""
        store = store or self.store
        store.wait([key], limit or LONG)
        return pickle.loads(store.get(key))


_MINE: list[Groups] = []


def joined(plan: Plan, who: Rank, *, timeout_s: float | None) -> "Groups | None":
    """Return this rank's group, after it has found the store; None where all ranks train together."""
    count = getattr(plan.world, "groups", None)
    _MINE.clear()
    if count is None:
        return None
    from torch.distributed import TCPStore

    limit: dict[str, Any] = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    store = TCPStore(who.master_addr, who.master_port, is_master=who.rank == 0, wait_for_workers=False, **limit)
    size = who.world_size // count
    life = int(os.environ.get(LIFE_VARIABLE, "0"))
    _MINE.append(Groups(store, who.rank, who.rank // size, size, count, list(range(count)), life))
    return _MINE[0]


def mine() -> "Groups | None":
    """Return the groups of this process, after its ranks have been started; None where all ranks train together."""
    return _MINE[0] if _MINE else None


def number() -> int:
    """Return the number of this rank's group; 0 where all ranks train together."""
    return _MINE[0].number if _MINE else 0


def ended() -> None:
    """Leave the store; rank 0 keeps it until every group that trains has."""
    if not _MINE:
        return
    from torch.distributed import DistError

    groups = _MINE.pop()
    try:
        groups.tell(f"ended/{groups.rank}", True)
        if groups.rank == 0:
            groups.store.wait([f"ended/{rank}" for group in groups.living for rank in groups.of(group)], LEAVE)
    except DistError as error:
        print(f"a group has not ended: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)


LEAVE = timedelta(seconds=60)
"""How long rank 0 keeps the store for groups that are behind it at the end."""
