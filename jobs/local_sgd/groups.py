"""Local SGD groups: the group of this rank, and the TCP store that connects all groups.

Each group has a torch process group of its own, so that no training collective leaves the group. Groups exchange
messages through a store on rank 0, and weights when they are averaged (`jobs.local_sgd.averaging`).
"""

import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from bench.contract.plan import Plan
from bench.contract.run_files import RESTART_VARIABLE
from jobs.ranks.identity import Rank

if TYPE_CHECKING:
    from torch.distributed import Store

WAIT_TIMEOUT, GATHER_TIMEOUT = timedelta(days=1), timedelta(minutes=10)
"""WAIT_TIMEOUT: for a value that only the end of rank 0 can prevent, which closes the connection.
GATHER_TIMEOUT: for the values of other ranks in `Groups.gather`."""
SHUTDOWN_TIMEOUT = timedelta(seconds=60)
"""How long rank 0 keeps the store open at the end for groups that are slower."""


@dataclass(slots=True)
class Groups:
    """All groups, as one rank knows them. Ranks have the numbers that the launcher assigned."""

    store: "Store"
    rank: int
    number: int
    """Number of this rank's group."""
    size: int
    """Ranks per group."""
    count: int
    """Number of groups at the start."""
    active: list[int]
    """Numbers of the groups that train; equal on all their ranks."""
    restart_count: int = 0
    """How often this rank's group was restarted in this attempt at the trial."""
    readmitted: dict[int, int] = field(default_factory=dict, init=False)
    """On rank 0, by group: the restart_count with which it was last readmitted."""
    _num_gathers: int = field(default=0, init=False)

    @property
    def position(self) -> int:
        """This rank's number in its group."""
        return self.rank % self.size

    @property
    def ranks(self) -> range:
        """The ranks of this rank's group."""
        return self.ranks_of(self.number)

    def ranks_of(self, number: int) -> range:
        return range(number * self.size, (number + 1) * self.size)

    def gather(self, value: Any) -> list[Any]:
        """Return the value of each rank; all ranks call this together. The value of a failed or late rank is None.

        The wait for all ranks together is at most GATHER_TIMEOUT.
        """
        from torch.distributed import DistStoreError

        self._num_gathers += 1
        name = f"gathered/{self._num_gathers}"
        self.set(f"{name}/{self.rank}", value)
        keys = {rank: f"{name}/{rank}" for group in self.active for rank in self.ranks_of(group)}
        with suppress(DistStoreError):  # timed out
            self.store.wait(list(keys.values()), GATHER_TIMEOUT)
        values: list[Any] = [None] * (self.size * self.count)
        for rank, key in keys.items():
            if self.store.check([key]):
                values[rank] = self.get(key)
        return values

    def set(self, key: str, value: Any) -> None:
        """Publish a value to the other ranks. Each key is set once."""
        self.store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # torch's stub does not accept bytes

    def get(self, key: str, limit: timedelta | None = None, store: "Store | None" = None) -> Any:
        """Wait for a key and return its value. Another thread passes a store connection of its own."""
        store = store or self.store
        store.wait([key], limit or WAIT_TIMEOUT)
        return pickle.loads(store.get(key))


_CURRENT: list[Groups] = []


def join(plan: Plan, who: Rank, *, timeout_s: float | None) -> "Groups | None":
    """Connect to the store and return this rank's group; None without local SGD."""
    count = getattr(plan.world, "groups", None)
    _CURRENT.clear()
    if count is None:
        return None
    from torch.distributed import TCPStore

    limit: dict[str, Any] = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    store = TCPStore(who.master_addr, who.master_port, is_master=who.rank == 0, wait_for_workers=False, **limit)
    size = who.world_size // count
    restart_count = int(os.environ.get(RESTART_VARIABLE, "0"))
    _CURRENT.append(Groups(store, who.rank, who.rank // size, size, count, list(range(count)), restart_count))
    return _CURRENT[0]


def current() -> "Groups | None":
    """Return the groups of this process after `join`; None without local SGD."""
    return _CURRENT[0] if _CURRENT else None


def number() -> int:
    """Return the number of this rank's group; 0 without local SGD."""
    return _CURRENT[0].number if _CURRENT else 0


def shut_down() -> None:
    """Disconnect from the store. Rank 0 keeps it open until all active groups have disconnected."""
    if not _CURRENT:
        return
    from torch.distributed import DistError

    groups = _CURRENT.pop()
    try:
        groups.set(f"ended/{groups.rank}", True)
        if groups.rank == 0:
            keys = [f"ended/{rank}" for group in groups.active for rank in groups.ranks_of(group)]
            groups.store.wait(keys, SHUTDOWN_TIMEOUT)
    except DistError as error:
        print(f"a local SGD group did not shut down: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
