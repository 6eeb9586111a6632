"""Seconds of collectives: known closed forms, and never fewer when a link gets slower."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract.network import Network, Transport
from bench.prediction import network
from bench.prediction.network import Group, Links

NETWORK = Network(source="", nvlink_gbs=300, nvlink_latency_us=0, nics_per_node=8, nic_gbs=50, nic_latency_us=0)
EIGHT = network.links(NETWORK, 8)
GB = 1e9


def test_a_ring_moves_all_but_one_share_over_the_slowest_link() -> None:
    assert network.all_gather_s(8 * GB, Group(8, 8), EIGHT) == pytest.approx(7 / 300)
    # two ranks of each node send at the same time, each with its own card
    assert network.all_gather_s(8 * GB, Group(8, 2), EIGHT) == pytest.approx(7 / (2 * 50))
    assert network.all_reduce_s(8 * GB, Group(8, 8), EIGHT) == pytest.approx(2 * 7 / 300)


def test_two_gpus_of_a_node_may_reach_less_of_nvlink_than_eight() -> None:
    fabric = network.links(NETWORK, 8, ((2, 0.7), (4, 0.9)))
    seconds = [network.all_gather_s(8 * GB, Group(ranks, ranks), fabric) for ranks in (2, 4, 8)]
    assert seconds == pytest.approx([4 / 210, 6 / 270, 7 / 300])


def test_each_rank_sends_to_every_other_one_by_the_link_between_them() -> None:
    assert network.all_to_all_s(8 * GB, Group(8, 8), EIGHT) == pytest.approx(7 / 300)
    assert network.all_to_all_s(8 * GB, Group(16, 8), EIGHT) == pytest.approx(8 / 16 * 8 / 50)
    assert network.all_to_all_s(8 * GB, Group(1, 1), EIGHT) == 0


def test_switches_that_add_save_time() -> None:
    within, between = Group(8, 8), Group(64, 8)
    multicast = replace(EIGHT, has_multicast=True)
    assert network.all_reduce_s(8 * GB, within, multicast) == pytest.approx(8 / 300)
    assert network.all_reduce_s(8 * GB, between, multicast) == network.all_reduce_s(8 * GB, between, EIGHT)
    sharp = replace(EIGHT, has_reduction=True, nvlink=4 * EIGHT.nvlink)
    assert network.all_reduce_s(8 * GB, between, sharp) < network.all_reduce_s(
        8 * GB, between, replace(EIGHT, nvlink=sharp.nvlink)
    )


def test_many_ranks_with_little_data_take_a_tree() -> None:
    fabric = replace(EIGHT, nic_latency_s=14e-6)
    ring = 2 * (1023 * 14e-6)  # two passes over 1,024 nodes
    assert network.all_reduce_s(8, Group(1024, 1), fabric) == pytest.approx(2 * 10 * 14e-6, rel=0.01)
    assert network.all_reduce_s(8, Group(1024, 1), fabric) < ring / 100


def test_a_site_s_network_becomes_the_share_of_one_gpu() -> None:
    shared = network.links(replace(NETWORK, nics_per_node=2, oversubscription=2.0), 8)
    assert shared.nic == pytest.approx(2 * 50 * GB / 8 / 2)
    assert network.links(replace(NETWORK, transport=Transport.tcp), 8).nic == 6 * GB
    crossed = replace(NETWORK, nvlink_gbs=30, rail_optimized=False)
    assert network.links(crossed, 8).nic == 30 * GB, "data crosses NVLink to the GPU at the right card"
    sharp = replace(NETWORK, in_network_reduction=True)
    assert network.links(sharp, 8).has_reduction
    assert not network.links(replace(sharp, transport=Transport.tcp), 8).has_reduction
    rack = network.links(replace(NETWORK, nvlink_gpus=72), 4)
    assert rack.group(16, 4) == Group(16, 16) and rack.group(32, 4) == Group(32, 18)
    assert EIGHT.group(16, 4) == Group(16, 2) and EIGHT.group(16, 8) == Group(16, 1)


@given(
    ranks=st.integers(1, 4096),
    inside=st.integers(1, 72),
    size=st.floats(1, 1e12),
    slower=st.floats(1, 100),
    link=st.sampled_from(["nvlink", "nic", "nvlink_latency_s", "nic_latency_s"]),
    special=st.booleans(),
)
def test_no_collective_is_faster_over_a_slower_link(
    ranks: int, inside: int, size: float, slower: float, link: str, special: bool
) -> None:
    group = Group(ranks, min(ranks, inside))
    shares = ((2, 0.7), (4, 0.9)) if special else ()
    fabric = Links(
        72, 300 * GB, 3.4e-6, 50 * GB, 14e-6, has_multicast=special, has_reduction=special, smaller_groups=shares
    )
    value = getattr(fabric, link)
    worse = replace(fabric, **{link: value * slower if link.endswith("_s") else value / slower})
    for seconds in (network.all_gather_s, network.all_reduce_s, network.all_to_all_s, network.send_s):
        assert seconds(size, group, worse) >= seconds(size, group, fabric) * (1 - 1e-12)
