"""Which ranks are slow, why, and what they cost: decided from windows with normally distributed noise."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.contract import run_files, telemetry
from bench.contract.telemetry import Sample
from jobs.ranks.slow_ranks import PERSISTENT, Place, Slow, SlowRanks, Window, noise_of_median

STEPS, STEP_S = 20, 0.5
PLACES = [Place(f"dgx-{rank // 4}", rank % 4) for rank in range(16)]


class Ranks:
    """Sixteen ranks on four nodes, of which some are slower by a share of a step."""

    def __init__(self, seed: int, noise: float = 0.02, folder: Path = Path("unused"), pp: int = 1) -> None:
        self.random, self.noise, self.elapsed_s = np.random.default_rng(seed), noise, 0.0
        stages = [rank // (len(PLACES) // pp) for rank in range(len(PLACES))]
        self.slow = SlowRanks(PLACES, stages, folder, trial=0)

    def window(
        self, slower: dict[int, float], part: str = "", evaluation: dict[int, float] | None = None
    ) -> list[Slow]:
        windows, own_s = [], np.empty((len(PLACES), STEPS))
        for rank in range(len(PLACES)):
            more = slower.get(rank, 0.0)
            own_s[rank] = STEP_S * (1 + more + self.noise * self.random.standard_normal(STEPS))
        self.elapsed_s += float(own_s.max(axis=0).sum())
        for rank, of_rank in enumerate(own_s):
            parts = {name: STEP_S * slower.get(rank, 0.0) * (name == part) for name in ("loading_s", "host_wait_s")}
            one = Window(
                num_steps=STEPS,
                step_s=float(own_s.max()),
                own_s=float(np.median(of_rank)),
                noise_s=noise_of_median(of_rank.tolist()),
                evaluation_s=0.0 if evaluation is None else 2.0 * (1 + evaluation.get(rank, 0.0)),
                elapsed_s=self.elapsed_s,
                **parts,
            )
            windows.append(one)
        return self.slow.add(windows)


@pytest.mark.parametrize(
    ("part", "cause"),
    [("", "computation"), ("loading_s", "data loading"), ("host_wait_s", "host contention")],
)
def test_a_slow_rank_is_named_with_its_cause_and_price(part: str, cause: str) -> None:
    """Once, after five windows. The other fifteen wait 15 % of 1.15 steps, less what the slowest of them needs."""
    ranks = Ranks(seed=3)
    reported = [ranks.window({6: 0.15}, part) for _ in range(2 * PERSISTENT)]
    assert [bool(each) for each in reported] == [n == PERSISTENT - 1 for n in range(2 * PERSISTENT)]
    [slow] = reported[PERSISTENT - 1]
    assert (slow.node, slow.ranks, slow.cause, slow.reasons) == ("dgx-1", (6,), cause, ())
    assert slow.own_s == pytest.approx(1.15 * STEP_S, rel=0.02) and slow.usual_s == pytest.approx(STEP_S, rel=0.02)
    assert slow.percent == pytest.approx(100 * 0.15 / 1.15, abs=2)
    summary = ranks.slow.summary()
    assert summary is not None and [(s["ranks"], s["cause"]) for s in summary["slow"]] == [([6], cause)]
    assert np.argmax(summary["own_ms"]) == 6 and summary["steps"] == 2 * PERSISTENT * STEPS


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), noise=st.sampled_from([0.01, 0.05, 0.2]), pp=st.sampled_from([1, 2]))
def test_without_a_slow_rank_none_is_accused(seed: int, noise: float, pp: int) -> None:
    """Also with stages that differ by 30 %, and with a rank that is slow for less than five windows."""
    ranks, second_stage = Ranks(seed, noise, pp=pp), range(8, 16) if pp == 2 else ()
    for number in range(12):
        slower = dict.fromkeys(second_stage, 0.3)
        if number < PERSISTENT - 1:
            slower[3] = 0.5
        assert not ranks.window(slower)


def test_ranks_of_one_node_are_one_finding_and_nodes_are_two() -> None:
    ranks = Ranks(seed=1)
    reported = [slow for _ in range(PERSISTENT) for slow in ranks.window({0: 0.1, 1: 0.1, 8: 0.3})]
    assert [(slow.node, slow.ranks) for slow in reported] == [("dgx-0", (0, 1)), ("dgx-2", (8,))]
    assert reported[0].percent < reported[1].percent


def test_a_slow_evaluation_is_reported_as_such() -> None:
    ranks = Ranks(seed=2)
    reported = [slow for _ in range(4) for slow in ranks.window({}, evaluation={9: 0.5, 10: 0.4, 1: 0.3})]
    assert [(slow.ranks, slow.cause) for slow in reported] == [((1,), "evaluation"), ((9, 10), "evaluation")]
    assert (reported[1].own_s, reported[1].usual_s) == (3.0, 2.0)
    summary = ranks.slow.summary()
    assert summary is not None and [each["ranks"] for each in summary["slow"]] == [[1], [9, 10]]


def test_telemetry_gives_the_reason(tmp_path: Path) -> None:
    """GPU 2 of dgx-1 is throttled and on fewer lanes; GPU 1 of dgx-1 belongs to no slow rank."""
    (tmp_path / run_files.RANK_LOGS).mkdir()
    for node in dict.fromkeys(place.node for place in PLACES):
        samples = [_sample(gpu, is_bad=node == "dgx-1" and gpu in (1, 2)) for _ in range(9) for gpu in range(4)]
        path = tmp_path / run_files.telemetry(0, node)
        path.write_text(telemetry.header() + telemetry.lines(samples))
    ranks = Ranks(seed=5, folder=tmp_path)
    [slow] = [slow for _ in range(PERSISTENT) for slow in ranks.window({6: 0.2})]
    assert slow.reasons == (
        "GPU 2 throttled: hardware thermal slowdown",
        "GPU 2 SM clock 1,200 MHz, others 1,900 MHz",
        "GPU 2 PCIe lanes 8, others 16",
        "GPU 2 has 3 uncorrected ECC errors",
    )
    for path in tmp_path.glob(run_files.telemetry(0, "*")):  # read once, not in each further window
        path.unlink()
    assert not ranks.window({6: 0.2})
    summary = ranks.slow.summary()
    assert summary is not None and summary["slow"][0]["reasons"] == list(slow.reasons)


@pytest.mark.parametrize(
    ("slower", "part", "node"),
    [
        ({6: 0.15}, "", "dgx-1"),
        ({6: 0.15, 7: 0.2}, "", "dgx-1"),
        ({6: 0.15}, "loading_s", None),
        ({6: 0.15}, "host_wait_s", None),
        ({6: 0.15, 9: 0.15}, "", None),
        ({}, "", None),
    ],
)
def test_only_one_node_that_computes_slowly_is_replaced(slower: dict[int, float], part: str, node: str | None) -> None:
    """Not two nodes: a slow rank also delays the ranks of its replica on other nodes."""
    ranks, replaced = Ranks(seed=11), []
    for _ in range(2 * PERSISTENT):
        ranks.window(slower, part, evaluation={12: 0.5})
        replaced.append(ranks.slow.to_replace())
    *before, last = [None if slow is None else slow.node for slow in replaced]
    assert not any(before), "the finding holds for five more windows first"
    assert last == node
    if (slow := replaced[-1]) is not None:
        assert slow.excess_s == pytest.approx((max(slower.values()) * STEP_S), rel=0.2)


def test_a_rank_that_recovers_is_not_replaced() -> None:
    ranks = Ranks(seed=12)
    for number in range(4 * PERSISTENT):
        ranks.window({} if number == 2 * PERSISTENT - 2 else {6: 0.3} if number < 2 * PERSISTENT else {})
        assert ranks.slow.to_replace() is None


def test_of_two_slow_nodes_the_one_with_a_reason_in_telemetry_is_replaced(tmp_path: Path) -> None:
    (tmp_path / run_files.RANK_LOGS).mkdir()
    for node in dict.fromkeys(place.node for place in PLACES):
        samples = [_sample(gpu, is_bad=node == "dgx-1" and gpu == 2) for _ in range(9) for gpu in range(4)]
        (tmp_path / run_files.telemetry(0, node)).write_text(telemetry.header() + telemetry.lines(samples))
    ranks = Ranks(seed=13, folder=tmp_path)
    for _ in range(2 * PERSISTENT):
        ranks.window({6: 0.2, 10: 0.2})
    slow = ranks.slow.to_replace()
    assert slow is not None and slow.node == "dgx-1"


def test_a_reason_that_most_gpus_have_is_none(tmp_path: Path) -> None:
    """Two H200s at their power cap: the delayed one was not slow because of the cap."""
    (tmp_path / run_files.RANK_LOGS).mkdir()
    for node in dict.fromkeys(place.node for place in PLACES):
        samples = [replace(_sample(gpu, is_bad=False), throttle=("software power cap",)) for gpu in range(4)]
        (tmp_path / run_files.telemetry(0, node)).write_text(telemetry.header() + telemetry.lines(samples))
    ranks = Ranks(seed=14, folder=tmp_path)
    [slow] = [slow for _ in range(PERSISTENT) for slow in ranks.window({6: 0.2})]
    assert slow.reasons == ()


def _sample(gpu: int, *, is_bad: bool) -> Sample:
    return Sample(
        time_ms=0,
        monotonic_ms=0,
        gpu=gpu,
        power_w=600.0,
        sm_clock_mhz=1200.0 if is_bad else 1900.0,
        temperature_c=70.0,
        throttle=("hardware thermal slowdown", "idle") if is_bad else ("idle",),
        pcie_lanes=8.0 if is_bad else 16.0,
        ecc_errors=3.0 if is_bad else 0.0,
    )
