"""The verdict on simulated clusters, and the rounds of pairs."""

import runpy
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import ROOT
from jobs.node_checks import culprit
from jobs.node_checks.culprit import Kind, Measurements, Pair

NUM_CASES, LARGEST = 60, 64


@pytest.fixture(scope="module")
def simulation() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "experiments" / "find_slow.py"))


@pytest.mark.long
def test_the_slow_part_of_simulated_clusters_is_named(simulation: dict[str, Any]) -> None:
    """`make find-slow` draws 1,000 clusters of up to 512 nodes by a new seed; these 60 are always the same."""
    outcomes: Counter[str] = Counter()
    for case in range(NUM_CASES):
        cluster = simulation["random_cluster"](np.random.default_rng([2026, case]), LARGEST)
        verdict, num_rounds = simulation["searched"](cluster)
        assert num_rounds < culprit.max_rounds(len(cluster.inside)), "the last round is left for the ring"
        outcomes[simulation["outcome"](cluster, verdict)] += 1
    assert outcomes["right"] >= 59 and outcomes["false"] == 0


@given(st.integers(2, 70))
def test_rounds_measure_every_link_of_the_ring_first_and_then_new_pairs(num_nodes: int) -> None:
    played = list(culprit.rounds(num_nodes))
    assert len(played) == culprit.max_rounds(num_nodes) - 1 == 2 * int(np.ceil(np.log2(num_nodes)))
    for pairs in played:
        met = Counter(node for pair in pairs for node in pair)
        assert max(met.values()) == 1 and set(met) <= set(range(num_nodes))
    first = {frozenset(pair) for pairs in played[: 2 + num_nodes % 2] for pair in pairs}
    assert first == {frozenset((node, (node + 1) % num_nodes)) for node in range(num_nodes)}


def healthy(num_nodes: int, num_rails: int, seed: int = 0) -> Measurements:
    """Return measurements in which all rates are alike, with 1 % noise."""
    random = np.random.default_rng(seed)

    def rates(*shape: int) -> Any:
        return 100 * (1 + 0.01 * random.standard_normal(shape))

    own = {"GEMM": rates(num_nodes, num_rails, 20)}
    pairs = [Pair(pair, rates(num_rails, 5)) for round_ in culprit.rounds(num_nodes) for pair in round_]
    return Measurements(own, rates(num_nodes, 20) if num_rails > 1 else None, num_nodes, num_rails, pairs)


def named(measured: Measurements) -> list[tuple[Kind, tuple[int, ...], int | None]]:
    verdict = culprit.decide(measured)
    assert verdict.decided
    return [(one.kind, one.nodes, one.rail) for one in verdict.culprits]


def slowed(measured: Measurements, *nodes: int, rail: int | None = None, is_link: bool = False) -> Measurements:
    """Halve the rates of the pairs with one of these nodes (is_link: with both) on this rail."""
    pairs = []
    for pair in measured.pairs:
        hit = set(nodes) == set(pair.nodes) if is_link else bool(set(nodes) & set(pair.nodes))
        factor = np.ones((len(pair.rates), 1))
        factor[slice(None) if rail is None else rail] = 0.5 if hit else 1.0
        pairs.append(Pair(pair.nodes, pair.rates * factor))
    return replace(measured, pairs=pairs)


def test_what_is_slow_in_which_tests_decides_between_gpu_host_nic_rail_and_link() -> None:
    sound = healthy(6, 4)
    inside = np.ones((6, 1))
    inside[2] = 0.5
    slow_inside = replace(sound, inside=sound.inside * inside)
    assert named(sound) == []
    assert named(slowed(sound, 2, rail=1)) == [(Kind.NIC, (2,), 1)]
    assert named(slowed(slow_inside, 2, rail=1)) == [(Kind.GPU, (2,), 1)]
    assert named(slowed(slow_inside, 2)) == [(Kind.HOST, (2,), None)]
    assert named(slow_inside) == [(Kind.HOST, (2,), None)]
    assert named(slowed(sound, 2)) == [(Kind.NIC, (2,), None)]
    assert named(slowed(sound, *range(6), rail=3)) == [(Kind.RAIL, (), 3)]
    assert named(slowed(sound, 2, 3, is_link=True)) == [(Kind.LINK, (2, 3), None)]
    gemm = sound.own["GEMM"].copy()
    gemm[4, 3] *= 0.5
    assert named(replace(slowed(sound, 0, rail=2), own={"GEMM": gemm})) == [
        (Kind.GPU, (4,), 3),
        (Kind.NIC, (0,), 2),
    ]


def test_of_two_nodes_the_pair_is_named_unless_one_node_is_slow_alone() -> None:
    sound = healthy(2, 1)
    assert named(sound) == [(Kind.LINK, (0, 1), None)]
    gemm = sound.own["GEMM"].copy()
    gemm[1] *= 0.7
    assert named(replace(sound, own={"GEMM": gemm})) == [(Kind.GPU, (1,), 0)]


def test_a_slowdown_in_the_noise_accuses_no_node() -> None:
    random = np.random.default_rng(1)
    measured = healthy(8, 1)
    noisy = [Pair(pair.nodes, 100 * np.exp(0.3 * random.standard_normal(pair.rates.shape))) for pair in measured.pairs]
    slow = [Pair(pair.nodes, pair.rates * (0.9 if 3 in pair.nodes else 1.0)) for pair in noisy]
    assert culprit.decide(replace(measured, pairs=slow)).culprits == ()


def test_a_slow_host_is_not_named_again_by_one_of_its_gpus() -> None:
    sound = healthy(6, 4)
    gemm, copy = sound.own["GEMM"].copy(), healthy(6, 4, seed=3).own["GEMM"]
    gemm[2] *= 0.5
    copy[2, 1] *= 0.5
    assert named(replace(sound, own={"GEMM": gemm, "copy": copy})) == [(Kind.HOST, (2,), None)]


def test_a_link_that_the_ring_does_not_use_is_not_named() -> None:
    sound = healthy(6, 1)
    unused = next(pair.nodes for pair in sound.pairs if abs(pair.nodes[1] - pair.nodes[0]) not in (1, 5))
    factors = (0.93 if pair.nodes == unused else 1.0 for pair in sound.pairs)
    pairs = [Pair(pair.nodes, factor * pair.rates) for pair, factor in zip(sound.pairs, factors, strict=True)]
    assert culprit.decide(replace(sound, pairs=pairs)).culprits == ()


def test_a_verdict_waits_for_every_link_of_the_ring() -> None:
    """A GPU that is slow by itself is clear from the first round, but the last link could be slow, too."""
    whole = slowed(healthy(5, 1), 1)
    gemm = whole.own["GEMM"].copy()
    gemm[1] *= 0.5
    rates = {pair.nodes: pair for pair in whole.pairs}
    measured = replace(whole, own={"GEMM": gemm}, pairs=[])
    verdict, number = culprit.searched(measured, lambda pairs: [rates[pair] for pair in pairs])
    assert [one.nodes for one in verdict.culprits] == [(1,)] and number >= 3
    links = {frozenset((node, (node + 1) % 5)) for node in range(5)}
    assert links <= {frozenset(pair.nodes) for pair in measured.pairs}


def test_no_verdict_accuses_most_nodes() -> None:
    sound = healthy(4, 2)
    gemm = sound.own["GEMM"].copy()
    gemm[0] *= 0.5
    inside = np.ones((4, 1))
    inside[1] = 0.5
    verdict = culprit.decide(slowed(replace(sound, own={"GEMM": gemm}, inside=sound.inside * inside), 2))
    assert len({one.nodes for one in verdict.culprits}) == 3 and not verdict.decided
