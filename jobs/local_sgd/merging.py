"""Merge what groups of ranks have trained apart: who is there, and the mean of their numbers, over gloo.

Each rank exchanges its part of the weights with the ranks of the same position in the other groups, in pieces. Pieces
on a GPU are encoded, decoded and averaged there, on its current stream; gloo sends encoded bytes from host memory, once
they have been copied. A merge counts once every rank of every group that takes part has all of its pieces; rank 0
decides that, by the store. A group that does not come within the time limit, or breaks off, has left: the others make
the exchange again without it. Started again, it joins at the end of a merge (`jobs.local_sgd.joining`).
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
from jobs.local_sgd import joining
from jobs.local_sgd.compression import MULTIPLE, decoded, encoded
from jobs.local_sgd.groups import Groups

PIECE, SMALL_PIECE, PIECES = 2**23, 2**16, 16
"""Numbers of the largest piece, 32 MiB in FP32. There are as many pieces at least, unless they are small ones then."""
AHEAD = 2
"""Pieces whose parts are on their way behind one that is averaged, and so many means of others."""
Pieces = Callable[[], Iterable[Tensor]]
"""Yields the numbers of a rank piece by piece, flat and in FP32, all on one device; it may be asked again."""
Take = Callable[[int, Tensor], object]
"""Takes the number of a piece and its mean over the groups, on the piece's device."""


def piece_size(total: int) -> int:
    """Return the numbers of a piece of so many, so that the network has the next ones while one is averaged."""
    return min(PIECE, max(SMALL_PIECE, total // PIECES))


@dataclass(frozen=True, slots=True)
class Merged:
    """What one merge took, and with whom."""

    groups: list[int]
    said: list[Any]
    """By the groups that took part: what their first ranks said of themselves."""
    left: list[int]
    """Groups that have left in this merge."""
    joined: dict[int, int]
    """Groups that train from here on again, by their life."""
    waited_s: float
    """Until all were there, with the time limits of those that were not."""
    exchange_s: float
    rank_bytes: int
    """What this rank sent, in exchanges that were made again too."""


class Meeting:
    """Where the groups meet again and again; each rank has one. One thread at a time uses it."""

    def __init__(self, groups: Groups, compress: Compress, time_limit_s: float) -> None:
        self._groups, self._compress, self._limit_s = groups, compress, time_limit_s
        store = groups.store
        self._store = store.clone() if hasattr(store, "clone") else store  # another thread waits on the first
        self._living = list(groups.living)
        self._link: ProcessGroupGloo | None = None
        self._joined: list[int] = []

    def begin(self) -> None:
        """Take in which groups train now."""
        self._living = list(self._groups.living)

    def merge(self, name: str, said: Any, pieces: Pieces, take: Take, *, lets_in: bool = True) -> Merged:
        """Give the mean of every piece over the groups to `take`; of an exchange that breaks off, again.

        Behind it groups that were started again are let in.

        Raises:
            BenchError: the others have gone on without this group, or rank 0 is gone.
        """
        before, sent, waited_s, exchange_s = self._living, 0, 0.0, 0.0
        for attempt in range(2 * len(before) + 1):
            since_s = time.perf_counter()
            there = self._call(f"{name}/{attempt}/there", said)
            waited_s += time.perf_counter() - since_s
            since_s = time.perf_counter()
            is_done, size = self._exchanged(f"{name}/{attempt}", sorted(there), pieces, take)
            exchange_s += time.perf_counter() - since_s
            sent += size
            done = self._call(f"{name}/{attempt}/done", is_done)
            if sorted(done) == sorted(there) and all(all(of_ranks) for of_ranks in done.values()):
                left = [group for group in before if group not in there]
                joined = self._let_in(name) if lets_in else {}
                said_by = [there[group][0] for group in sorted(there)]
                return Merged(sorted(there), said_by, left, joined, waited_s, exchange_s, sent)
            self._link = None
        raise self._error(f"{name} was not finished in {attempt + 1} exchanges")

    def _let_in(self, name: str) -> dict[int, int]:
        """Return the groups that rank 0 lets in, by their life."""
        if self._groups.rank == 0:
            self._groups.tell(f"{name}/joined", joining.waiting(self._groups, self._living, self._store))
        joined: dict[int, int] = self._told(f"{name}/joined", None)
        if joined:
            self._living, self._link = sorted({*self._living, *joined}), None
        return joined

    def _call(self, key: str, value: Any) -> dict[int, list[Any]]:
        """Return what the ranks of each group that is there say; the others have left.

        Raises:
            BenchError: rank 0 has counted this group among those, or is gone.
        """
        groups = self._groups
        groups.tell(f"{key}/{groups.rank}", value)
        if groups.rank == 0:
            until_s = time.monotonic() + self._limit_s
            found = {group: self._of_group(key, group, until_s) for group in self._living}
            groups.tell(key, {group: values for group, values in found.items() if values is not None})
        try:
            there: dict[int, list[Any]] = self._told(key, None)
        except RuntimeError as error:
            raise self._error("rank 0, which keeps the log, is gone") from error
        if groups.number not in there:
            raise self._error(f"the other groups have waited {self._limit_s:g} s for this one and gone on without it")
        self._living = sorted(there)
        return there

    def _of_group(self, key: str, group: int, until_s: float) -> list[Any] | None:
        """Return what the ranks of a group say; None if one of them does not until then."""
        left_s = max(0.001, until_s - time.monotonic())
        keys = [f"{key}/{rank}" for rank in self._groups.of(group)]
        try:
            self._store.wait(keys, timedelta(seconds=left_s))
        except DistStoreError:
            if not self._store.check(keys):
                return None
        return [self._told(one, None) for one in keys]

    def _told(self, key: str, limit: timedelta | None) -> Any:
        return self._groups.told(key, limit, self._store)

    def _exchanged(self, name: str, there: list[int], pieces: Pieces, take: Take) -> tuple[bool, int]:
        """Return whether this rank has the mean of all pieces, and what it sent for that."""
        if len(there) == 1:
            for number, piece in enumerate(pieces()):
                take(number, piece)
            return True, 0
        sent = 0
        try:
            link = self._linked(name, there)
            for number, (mean, size) in enumerate(_means(link, pieces(), self._compress)):
                take(number, mean)
                sent += size
        except RuntimeError as error:  # gloo's: a time-out, or a connection that was closed
            print(f"{name}: the exchange between groups {there} broke off: {str(error).splitlines()[0]}", flush=True)
            return False, sent
        return True, sent

    def _linked(self, name: str, there: list[int]) -> ProcessGroupGloo:
        """Return the process group of the ranks of this position in these groups."""
        groups = self._groups
        if self._link is None or self._joined != there:
            store = PrefixStore(f"{name}/position {groups.position}", self._store)
            limit = timedelta(seconds=self._limit_s)
            self._link = ProcessGroupGloo(store, there.index(groups.number), len(there), limit)
            self._joined = there
        return self._link

    def _error(self, what: str) -> BenchError:
        return BenchError(
            f"group {self._groups.number} leaves: {what}",
            where=f"rank {self._groups.rank}, recipe.local_sgd.time_limit_s",
            fix="look for what held this group up; the run goes on without it, and resumed from a checkpoint, with it",
            rule="RUN-19",
        )


def _means(link: ProcessGroupGloo, pieces: Iterable[Tensor], compress: Compress) -> Iterator[tuple[Tensor, int]]:
    """Yield the mean of each piece over the ranks of a link, and the bytes that this rank sent for it.

    Each rank gets its part of the piece from all others, and sends the mean of that part to all. So all ranks have the
    same bits, in whatever precision they cross the network. The network is never without work: parts of the next pieces
    are on their way while one is averaged and while its means are.
    """
    assert link.size() > 1
    scattered, gathered = deque[_Sent](), deque[_Sent]()
    for piece in pieces:
        scattered.append(_scattered(link, piece, compress))
        if len(scattered) > AHEAD:
            gathered.append(_gathered(link, scattered.popleft(), compress))
        if len(gathered) > AHEAD:
            yield _mean(gathered.popleft(), compress)
    for one in scattered:
        gathered.append(_gathered(link, one, compress))
    for one in gathered:
        yield _mean(one, compress)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A piece on its way: its parts to the ranks that average them, or their means to all ranks.

    `own` and `received` are bytes in host memory. The device is the piece's.
    """

    work: Any
    own: Tensor
    received: Tensor
    length: int
    device: torch.device

    def numbers(self, num_parts: int, compress: Compress) -> list[Tensor]:
        """Return the numbers of each part that was received, on the piece's device."""
        self.work.wait()
        raw = self.received.to(self.device, non_blocking=True)
        return [decoded(part, compress) for part in raw.view(num_parts, -1)]


def _buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Return host memory for bytes from or for a device; for a GPU it is page-locked, and torch uses it again."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _on_host(raw: Tensor) -> Tensor:
    """Return bytes in host memory. A copy from a GPU is complete, since gloo would not wait for it."""
    return _buffer(len(raw), raw.device).copy_(raw) if raw.is_cuda else raw


def _scattered(link: ProcessGroupGloo, piece: Tensor, compress: Compress) -> _Sent:
    size = link.size()
    length = -(-len(piece) // (size * MULTIPLE)) * MULTIPLE
    parts = torch.nn.functional.pad(piece, (0, size * length - len(piece))).view(size, length)
    own = _on_host(torch.cat([encoded(part, compress) for part in parts]))
    received = _buffer(len(own), piece.device)
    work = link.alltoall_base(received, own, [], [])  # type: ignore[attr-defined]  # not in torch's stub
    return _Sent(work, own, received, len(piece), piece.device)


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
