"""Search for what makes the all-reduce of all nodes slow: measure pairs of nodes in rounds, then a ring of the others.

`jobs.node_checks.culprit` chooses the pairs and decides. Pairs exchange messages within the process group of all ranks,
so a round needs no new group.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bench.contract.node_facts import AllReduceRate, PairRate, Search, SlowPart
from jobs.node_checks import culprit, rates
from jobs.node_checks.culprit import OWN_SAMPLES, PAIR_SAMPLES, Kind, Measurements, Pair

if TYPE_CHECKING:
    import torch

ROUND_S = 5.0
"""Messages are chosen so that a round takes about this long at most; with opened connections, it stays below 10 s."""


class Searched(NamedTuple):
    """The result of a search, and all pairs that it measured."""

    search: Search
    pairs: tuple[PairRate, ...]


def search(
    nodes: dict[str, list[int]], together: Sequence[AllReduceRate], rank: int, device: "torch.device"
) -> Searched:
    """Return what is slow, equal on every rank. All ranks call this together.

    nodes: the ranks of each node, at least two nodes. together: the all-reduce of all ranks, by message size.
    """
    began = time.monotonic()
    names, ranks = list(nodes), list(nodes.values())
    mine = next(place for place, those in enumerate(ranks) if rank in those)
    local = ranks[mine].index(rank)
    num_rails = min(map(len, ranks))
    mib = message_mib(together, num_rails)

    def measure(round_: list[tuple[int, int]]) -> list[Pair]:
        partner = next((a + b - mine for a, b in round_ if mine in (a, b)), None)
        other = None if partner is None or local >= num_rails else ranks[partner][local]
        seconds = rates.gathered(rates.exchange(other, other, mib, PAIR_SAMPLES, device))
        each = [[seconds[one] for one in those[:num_rails]] for those in ranks]
        return [Pair((a, b), 1 / np.maximum(each[a], each[b])) for a, b in round_]

    measured = alone(ranks, mib, rank, device)
    verdict, number = culprit.searched(measured, measure)
    parts = tuple(described(one, names) for one in verdict.culprits)
    excluded = slow_nodes(parts, names) if verdict.decided else ()
    others = [one for name, those in nodes.items() if name not in excluded for one in those]
    ring_gbs = None
    if excluded and len(names) - len(excluded) > 1:
        own = (
            rates.allreduce([max(together, key=lambda rate: rate.busbw_gbs).mib], device, others)
            if rank in others
            else ()
        )
        everyone = rates.gathered([rate.busbw_gbs for rate in own])
        ring_gbs, number = everyone[others[0]][0], number + 1
    pairs = []
    for pair in measured.pairs:
        first, second = pair.nodes
        busbw_gbs = float(np.median(pair.rates, axis=1).sum()) * mib * 2**20 / 1e9
        pairs.append(PairRate((names[first], names[second]), mib * num_rails, round(busbw_gbs, 3)))
    seconds = rates.slowest(time.monotonic() - began, device)
    return Searched(
        Search(number, round(seconds, 1), verdict.decided, round(verdict.confidence, 4), parts, excluded, ring_gbs),
        tuple(pairs),
    )


def message_mib(together: Sequence[AllReduceRate], num_rails: int) -> int:
    """Return the size of a message on one rail: the share of the best size that a round has time for."""
    affordable = [rate for rate in together if rate.ms * (PAIR_SAMPLES + 3) < ROUND_S * 1e3] or together[:1]
    return max(1, max(affordable, key=lambda rate: rate.busbw_gbs).mib // num_rails)


def alone(ranks: list[list[int]], mib: int, rank: int, device: "torch.device") -> Measurements:
    """Return the tests of each GPU alone, and those within each node, of all ranks."""
    num_rails = min(map(len, ranks))
    tests = rates.own_calls(device)
    own = {}
    for name, test in tests.items():
        rates.slowest(0.0, device)
        everyone = rates.gathered(rates.sampled(test.call, OWN_SAMPLES, device))
        own[name] = 1 / np.array([[everyone[one] for one in those[:num_rails]] for those in ranks])
    inside = None
    if num_rails > 1:
        those = next(those for those in ranks if rank in those)
        place = those.index(rank)
        after, before = those[(place + 1) % len(those)], those[place - 1]
        everyone = rates.gathered(rates.exchange(after, before, mib, OWN_SAMPLES, device))
        inside = 1 / np.array([np.max([everyone[one] for one in those], axis=0) for those in ranks])
    return Measurements(own, inside, len(ranks), num_rails)


def described(one: culprit.Culprit, names: list[str]) -> SlowPart:
    """Return a culprit with the names of its nodes."""
    return SlowPart(str(one.kind), tuple(names[node] for node in one.nodes), one.rail, round(one.confidence, 4))


def slow_nodes(parts: Sequence[SlowPart], names: list[str]) -> tuple[str, ...]:
    """Return the nodes to exclude: of a slow link one end, since no other node uses it; of only two nodes none."""
    excluded = [part.nodes[-1] for part in parts if part.nodes and not (part.kind == Kind.LINK and len(names) == 2)]
    return tuple(dict.fromkeys(excluded))
