"""Average the weights of local SGD groups: which groups take part, and the all-reduce of their weights over gloo.

Each rank exchanges its part of the weights with the ranks of the same position in the other groups, in chunks. Chunks
on a GPU are encoded, decoded and averaged there, on its current stream; gloo sends the encoded bytes from host memory
after they were copied. An averaging is complete once every rank of every group that takes part has all its chunks;
rank 0 decides that through the store. A group that misses the time limit or fails has left: the others repeat the
exchange without it. A restarted group rejoins at the end of an averaging (`jobs.local_sgd.rejoin`).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo

from bench.contract.local_sgd import Compress
from bench.errors import BenchError
from jobs.local_sgd import rejoin
from jobs.local_sgd.compression import MULTIPLE, decoded, encoded
from jobs.local_sgd.groups import Groups

MAX_CHUNK, MIN_CHUNK, MIN_NUM_CHUNKS = 2**23, 2**16, 16
"""Numbers of the largest chunk (32 MiB in FP32) and of the smallest. There are at least MIN_NUM_CHUNKS chunks, unless
they would be smaller than MIN_CHUNK."""
PREFETCH_CHUNKS = 2
"""Chunks that are sent while one is averaged; as many means are sent at the same time."""
Chunks = Callable[[], Iterable[Tensor]]
"""Yields the numbers of a rank chunk by chunk, flat, in FP32, all on one device; called again for each attempt."""
SetMean = Callable[[int, Tensor], object]
"""Stores the mean of a chunk over the groups, by the chunk's number; the mean is on the chunk's device."""


def chunk_size(total: int) -> int:
    """Return the numbers per chunk, so that the next chunks are sent while one is averaged."""
    return min(MAX_CHUNK, max(MIN_CHUNK, total // MIN_NUM_CHUNKS))


@dataclass(frozen=True, slots=True)
class AllReduceResult:
    """The groups, times and bytes of one weight averaging."""

    groups: list[int]
    """Groups that took part."""
    reports: list[Any]
    """Of the first rank of each of these groups."""
    left: list[int]
    """Groups that left in this averaging."""
    readmitted: dict[int, int]
    """Restarted groups that train again from here, with their restart counts."""
    waited_s: float
    """Time until all groups were ready, including the time limit of groups that were not."""
    exchange_s: float
    rank_bytes: int
    """Sent by this rank, including repeated exchanges."""


class GroupAllReduce:
    """The all-reduce between groups. Each rank has one; it is used by one thread at a time."""

    def __init__(self, groups: Groups, compress: Compress, time_limit_s: float) -> None:
        self._groups, self._compress, self._limit_s = groups, compress, time_limit_s
        store = groups.store
        self._store = store.clone() if hasattr(store, "clone") else store  # another thread waits on the original
        self._active = list(groups.active)
        self._link: ProcessGroupGloo | None = None
        self._linked_groups: list[int] = []

    def begin(self) -> None:
        """Read which groups are active."""
        self._active = list(self._groups.active)

    def average(
        self, name: str, report: Any, chunks: Chunks, set_mean: SetMean, *, may_readmit: bool = True
    ) -> AllReduceResult:
        """Average every chunk over the groups and pass its mean to `set_mean`; repeat an exchange that failed.

        Restarted groups are readmitted afterwards.

        Raises:
            BenchError: the other groups continued without this one, or rank 0 ended.
        """
        before, sent, waited_s, exchange_s = self._active, 0, 0.0, 0.0
        for attempt in range(2 * len(before) + 1):
            since_s = time.perf_counter()
            present = self._collect(f"{name}/{attempt}/there", report)
            waited_s += time.perf_counter() - since_s
            since_s = time.perf_counter()
            is_done, size = self._exchange(f"{name}/{attempt}", sorted(present), chunks, set_mean)
            exchange_s += time.perf_counter() - since_s
            sent += size
            done = self._collect(f"{name}/{attempt}/done", is_done)
            if sorted(done) == sorted(present) and all(all(of_ranks) for of_ranks in done.values()):
                left = [group for group in before if group not in present]
                readmitted = self._readmit(name) if may_readmit else {}
                reports = [present[group][0] for group in sorted(present)]
                return AllReduceResult(sorted(present), reports, left, readmitted, waited_s, exchange_s, sent)
            self._link = None
        raise self._error(f"{name} was not complete after {attempt + 1} exchanges between the groups")

    def _readmit(self, name: str) -> dict[int, int]:
        """Return the groups that rank 0 readmits, with their restart counts."""
        if self._groups.rank == 0:
            self._groups.set(f"{name}/joined", rejoin.waiting(self._groups, self._active, self._store))
        readmitted: dict[int, int] = self._get(f"{name}/joined", None)
        if readmitted:
            self._active, self._link = sorted({*self._active, *readmitted}), None
        return readmitted

    def _collect(self, key: str, value: Any) -> dict[int, list[Any]]:
        """Return the values of the ranks of each group that is present; the other groups have left.

        Raises:
            BenchError: rank 0 decided that this group has left, or rank 0 ended.
        """
        groups = self._groups
        groups.set(f"{key}/{groups.rank}", value)
        if groups.rank == 0:
            until_s = time.monotonic() + self._limit_s
            by_group = {group: self._of_group(key, group, until_s) for group in self._active}
            groups.set(key, {group: values for group, values in by_group.items() if values is not None})
        try:
            present: dict[int, list[Any]] = self._get(key, None)
        except RuntimeError as error:
            raise self._error("rank 0, which writes the log, has ended") from error
        if groups.number not in present:
            raise self._error(
                f"the other groups waited {self._limit_s:g} s for this group, then continued without this group"
            )
        self._active = sorted(present)
        return present

    def _of_group(self, key: str, group: int, until_s: float) -> list[Any] | None:
        """Return the values of the ranks of a group; None if one of them is missing at the time limit."""
        left_s = max(0.001, until_s - time.monotonic())
        keys = [f"{key}/{rank}" for rank in self._groups.ranks_of(group)]
        try:
            self._store.wait(keys, timedelta(seconds=left_s))
        except DistStoreError:
            if not self._store.check(keys):
                return None
        return [self._get(one, None) for one in keys]

    def _get(self, key: str, limit: timedelta | None) -> Any:
        return self._groups.get(key, limit, self._store)

    def _exchange(self, name: str, present: list[int], chunks: Chunks, set_mean: SetMean) -> tuple[bool, int]:
        """Return whether this rank has the mean of all chunks, and the bytes that it sent."""
        if len(present) == 1:
            for number, chunk in enumerate(chunks()):
                set_mean(number, chunk)
            return True, 0
        sent = 0
        try:
            link = self._linked(name, present)
            for number, (mean, size) in enumerate(_means(link, chunks(), self._compress)):
                set_mean(number, mean)
                sent += size
        except RuntimeError as error:  # gloo's: a time-out, or a connection that was closed
            print(f"{name}: exchange between groups {present} failed: {str(error).splitlines()[0]}", flush=True)
            return False, sent
        return True, sent

    def _linked(self, name: str, present: list[int]) -> ProcessGroupGloo:
        """Return the process group of the ranks of this position in these groups."""
        groups = self._groups
        if self._link is None or self._linked_groups != present:
            store = PrefixStore(f"{name}/position {groups.position}", self._store)
            limit = timedelta(seconds=self._limit_s)
            self._link = ProcessGroupGloo(store, present.index(groups.number), len(present), limit)
            self._linked_groups = present
        return self._link

    def _error(self, what: str) -> BenchError:
        return BenchError(
            f"group {self._groups.number} left the run: {what}",
            where=f"rank {self._groups.rank}, recipe.local_sgd.time_limit_s",
            fix="find out what delayed this group; to train with all groups again, resume the run from a checkpoint",
            rule="RUN-19",
        )


def _means(link: ProcessGroupGloo, chunks: Iterable[Tensor], compress: Compress) -> Iterator[tuple[Tensor, int]]:
    """Yield the mean of each chunk over the ranks of a link, and the bytes that this rank sent for it.

    Each rank receives its part of the chunk from all others (reduce-scatter), and sends the mean of that part to all
    (all-gather). So all ranks get the same bits in every precision. The network is always busy: the next chunks are
    sent while one is averaged and while its means are sent.
    """
    assert link.size() > 1
    scattered, gathered = deque[_Sent](), deque[_Sent]()
    for chunk in chunks:
        scattered.append(_scattered(link, chunk, compress))
        if len(scattered) > PREFETCH_CHUNKS:
            gathered.append(_gathered(link, scattered.popleft(), compress))
        if len(gathered) > PREFETCH_CHUNKS:
            yield _mean(gathered.popleft(), compress)
    for one in scattered:
        gathered.append(_gathered(link, one, compress))
    for one in gathered:
        yield _mean(one, compress)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A chunk that is being sent: its parts to the ranks that average them, or their means to all ranks.

    `own` and `received` are bytes in host memory. `device` is the chunk's.
    """

    work: Any
    own: Tensor
    received: Tensor
    length: int
    device: torch.device

    def numbers(self, num_parts: int, compress: Compress) -> list[Tensor]:
        """Return the numbers of each received part, on the chunk's device."""
        self.work.wait()
        raw = self.received.to(self.device, non_blocking=True)
        return [decoded(part, compress) for part in raw.view(num_parts, -1)]


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Return host memory for bytes of a device; for a GPU it is page-locked, and torch reuses it."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _on_host(raw: Tensor) -> Tensor:
    """Return bytes in host memory. A copy from a GPU is complete, since gloo would not wait for it."""
    return _buffer(len(raw), raw.device).copy_(raw) if raw.is_cuda else raw


def _scattered(link: ProcessGroupGloo, chunk: Tensor, compress: Compress) -> _Sent:
    size = link.size()
    length = -(-len(chunk) // (size * MULTIPLE)) * MULTIPLE
    parts = torch.nn.functional.pad(chunk, (0, size * length - len(chunk))).view(size, length)
    own = _on_host(torch.cat([encoded(part, compress) for part in parts]))
    received = _buffer(len(own), chunk.device)
    work = link.alltoall_base(received, own, [], [])  # type: ignore[attr-defined]  # not in torch's stub
    return _Sent(work, own, received, len(chunk), chunk.device)


def _gathered(link: ProcessGroupGloo, scattered: _Sent, compress: Compress) -> _Sent:
    size, device = link.size(), scattered.device
    own = _on_host(encoded(torch.stack(scattered.numbers(size, compress)).mean(dim=0), compress))
    received = _buffer(size * len(own), device)
    work = link._allgather_base(received, own)  # type: ignore[attr-defined]  # not in torch's stub
    return _Sent(work, own, received, scattered.length, device)


def _mean(gathered: _Sent, compress: Compress) -> tuple[Tensor, int]:
    size = len(gathered.received) // len(gathered.own)
    whole = torch.cat(gathered.numbers(size, compress))
    return whole[: gathered.length], 2 * (size - 1) * len(gathered.own)
