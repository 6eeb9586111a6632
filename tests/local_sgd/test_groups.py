"""Messages between local SGD groups through their store."""

import pickle
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from jobs.local_sgd.groups import GATHER_TIMEOUT, Groups


class PatientStore:
    """A store with fixed content and a fake clock. Waiting for a missing key takes the whole time limit."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = {key: pickle.dumps(value) for key, value in content.items()}
        self.waited = timedelta()

    def set(self, key: str, value: bytes) -> None:
        self.content[key] = value

    def get(self, key: str) -> bytes:
        return self.content[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.content for key in keys)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        if not self.check(keys):
            self.waited += limit
            raise DistStoreError("timed out")


def test_gather_waits_once_for_all_ranks_of_a_failed_group() -> None:
    """Of four groups of three ranks, group 1 has left, and two ranks of group 2 failed after the last averaging."""
    there = {rank: f"of rank {rank}" for rank in (1, 2, 3, 4, 7, 9, 10, 11)}
    store: Any = PatientStore({f"gathered/1/{rank}": value for rank, value in there.items()})
    values = Groups(store, 0, 0, 3, 4, active=[0, 2, 3]).gather("of rank 0")
    active = {rank: value for rank, value in there.items() if rank not in (3, 4)}
    assert values == ["of rank 0", *(active.get(rank) for rank in range(1, 12))]
    assert store.waited <= GATHER_TIMEOUT
