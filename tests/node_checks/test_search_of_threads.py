"""The search for slow parts with threads as the ranks of several nodes, whose measurements the test sets."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.contract.node_facts import AllReduceRate, SlowPart
from helpers import thread_ranks
from helpers.thread_ranks import Group
from jobs.node_checks import rates, search
from jobs.node_checks.culprit import Culprit, Kind
from jobs.node_checks.search import Searched

CPU = torch.device("cpu")
NODES = {"a": [0, 1], "b": [2, 3, 4], "c": [5, 6], "d": [7, 8]}
"""Node b has one rank more than the others, which is on no rail."""


class Cluster:
    """Ranks as threads: what each of them measures. Collectives fail if a rank is missing."""

    def __init__(self, size: int, slow: set[str]) -> None:
        self.size, self.slow, self._own = size, slow, threading.local()
        self.rings: list[tuple[list[int], Sequence[int]]] = []

    def run(self, nodes: dict[str, list[int]], together: Sequence[AllReduceRate]) -> list[Searched]:
        """Return what the search returns on each rank."""

        def of_rank(group: Group) -> Searched:
            self._own.group, self._own.rank = group, group.rank()
            return search.search(nodes, together, group.rank(), CPU)

        return thread_ranks.run(self.size, of_rank)

    def monotonic(self) -> float:
        """Return a clock of this rank that begins at 100 s.

        Each call advances it by the rank's number of seconds plus 0.26 s.
        """
        self._own.now_s = getattr(self._own, "now_s", 99.74 - self._own.rank) + self._own.rank + 0.26
        return float(self._own.now_s)

    def gathered(self, value: Any) -> list[Any]:
        group: Group = self._own.group
        return group.exchange(value)

    def slowest(self, seconds: float, device: torch.device) -> float:
        return float(max(self.gathered(seconds)))

    def own_calls(self, device: torch.device) -> dict[str, Any]:
        return {name: SimpleNamespace(call=lambda name=name: name, amount=1) for name in ("GEMM", "copy")}

    def _samples(self, seconds: float, num: int) -> list[float]:
        return [seconds * (1 + 0.002 * ((self._own.rank * 7 + sample * 5) % 9)) for sample in range(num)]

    def sampled(self, call: Any, num: int, device: torch.device) -> list[float]:
        return self._samples(2.0 if f"{call()} of {self._own.rank}" in self.slow else 1.0, num)

    def exchange(self, to: int | None, source: int | None, mib: int, num: int, device: torch.device) -> list[float]:
        pairs = self.gathered((to, source))
        if to is None or source is None:
            return []
        rank = self._own.rank
        assert pairs[to][1] == rank and pairs[source][0] == rank, "both ends exchange their messages"
        slow = f"{min(rank, to)}-{max(rank, to)}" in self.slow
        return self._samples((3.0 if slow else 1.0) * mib / 1000, num)

    def allreduce(self, sizes_mib: Sequence[int], device: torch.device, ranks: list[int]) -> tuple[AllReduceRate, ...]:
        if self._own.rank == ranks[0]:
            self.rings.append((ranks, sizes_mib))
        return (AllReduceRate(sizes_mib[0], 5.0, 77.0),)


TOGETHER = [AllReduceRate(64, 10.0, 20.0), AllReduceRate(256, 40.0, 30.0), AllReduceRate(1024, 800.0, 90.0)]


@pytest.mark.parametrize(
    ("slow", "parts", "excluded", "slowest_gbs"),
    [
        (set(), [], (), 2.07),
        ({"GEMM of 6"}, [("gpu", ("c",), 1)], ("c",), 2.07),
        ({"GEMM of 2", "GEMM of 3"}, [("host", ("b",), None)], ("b",), 2.07),
        ({"2-3", "3-4", "2-4"}, [("host", ("b",), None)], ("b",), 2.07),
        ({f"{min(a, 6)}-{max(a, 6)}" for a in (1, 3, 8)}, [("nic", ("c",), 1)], ("c",), 1.381),
        ({"0-2", "1-3"}, [("link", ("a", "b"), None)], ("b",), 0.69),
    ],
)
def test_every_rank_finds_the_same_slow_part_and_the_others_form_a_ring(
    monkeypatch: pytest.MonkeyPatch, slow: set[str], parts: list[Any], excluded: tuple[str, ...], slowest_gbs: float
) -> None:
    """Messages are the share of one rail of the best size that a round has time for."""
    cluster = Cluster(9, slow)
    for name in ("gathered", "slowest", "own_calls", "sampled", "exchange", "allreduce"):
        monkeypatch.setattr(rates, name, getattr(cluster, name))
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=cluster.monotonic))
    results = cluster.run(NODES, TOGETHER)
    assert all(each == results[0] for each in results[1:])
    result, pairs = results[0]
    assert [(part.kind, part.nodes, part.rail) for part in result.parts] == parts
    assert result.decided and result.excluded == excluded and result.confidence > 0.4
    others = [rank for name, ranks in NODES.items() if name not in excluded for rank in ranks]
    assert cluster.rings == ([(others, [1024])] if excluded else [])
    assert result.others_busbw_gbs == (77.0 if excluded else None)
    assert result.seconds == 8.3, "of the slowest rank, 8"
    assert min(pair.busbw_gbs for pair in pairs) == slowest_gbs
    assert {pair.mib for pair in pairs} == {256} and len(pairs) == 2 * (result.rounds - bool(excluded))


def test_a_message_is_the_share_of_the_best_affordable_size() -> None:
    assert search.message_mib(TOGETHER, 2) == 128, "1024 MiB takes 8 x 0.8 s, which is too long"
    assert search.message_mib([AllReduceRate(1024, 624.9, 90.0), *TOGETHER], 8) == 128
    assert search.message_mib([AllReduceRate(1024, 625.0, 90.0), *TOGETHER[:2]], 8) == 32
    assert search.message_mib([AllReduceRate(4, 900.0, 1.0), AllReduceRate(8, 901.0, 2.0)], 1) == 4
    assert search.message_mib([AllReduceRate(4, 1.0, 1.0)], 8) == 1


def test_a_culprit_with_the_names_of_its_nodes() -> None:
    names = ["a", "b", "c"]
    link = Culprit(Kind.LINK, (1, 2), None, 0.98765432)
    assert search.described(link, names) == SlowPart("link", ("b", "c"), None, 0.9877)
    assert search.described(Culprit(Kind.NIC, (0,), 3, 1.0), names) == SlowPart("nic", ("a",), 3, 1.0)


@pytest.mark.parametrize(
    ("parts", "num_nodes", "excluded"),
    [
        ([("link", ("a", "b"))], 2, ()),
        ([("link", ("a", "b"))], 3, ("b",)),
        ([("gpu", ("a",))], 2, ("a",)),
        ([("rail", ())], 3, ()),
        ([("nic", ("c",)), ("gpu", ("c",)), ("link", ("a", "b"))], 3, ("c", "b")),
    ],
)
def test_the_nodes_to_exclude(parts: list[Any], num_nodes: int, excluded: tuple[str, ...]) -> None:
    slow = [SlowPart(kind, nodes, None, 1.0) for kind, nodes in parts]
    assert search.slow_nodes(slow, ["a", "b", "c"][:num_nodes]) == excluded
