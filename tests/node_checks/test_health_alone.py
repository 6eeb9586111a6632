"""Rates of nodes by one process: what it measures itself, and what it makes of other ranks' measurements."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.contract import node_facts, plan_kinds, run_files
from bench.contract.node_facts import AllReduceRate, Floors, HealthNode, PairRate, RankRates, Search, SlowPart
from bench.contract.plan import Plan
from bench.contract.schema import Health
from bench.errors import BenchError
from helpers import alone, ranks
from helpers.nodes import health_report
from jobs.kernels import timing
from jobs.node_checks import floors, health, rates, search
from jobs.ranks.identity import Rank

CPU = torch.device("cpu")
DGX = ("dgx-0", "dgx-1", "dgx-2")


def composed(tmp: Path, num_ranks: int = 1, **floors_: float) -> Plan:
    planned = ranks.compose(tmp, "task=pretrain_tiny", f"cluster.ranks_per_node={num_ranks}")
    planned.config.cluster.health = Health(source="this test", min_mib=1, max_mib=2, **floors_)
    return planned


@pytest.mark.parametrize(("floor", "code"), [(0.5, None), (0.51, 1)])
def test_a_rank_alone_writes_its_rates_and_fails_below_a_floor(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    floor: float,
    code: int | None,
) -> None:
    """It has no all-reduce and no clock offset."""
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(composed(tmp_path, gemm_tflops=floor, copy_gbs=12.0)))
    monkeypatch.setattr(rates, "own_rates", lambda device: (0.5, 12.0))
    moments = iter((100.0, 107.26))
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: next(moments), time_ns=lambda: 1_780_000_999))
    with alone.started(monkeypatch, tmp_path / "plan.json"):
        monkeypatch.setenv("SLURMD_NODENAME", "dgx-7")
        if code is None:
            health.main()
        else:
            with pytest.raises(SystemExit, match=str(code)):
                health.main()
    report = json.loads((tmp_path / "health.json").read_text())
    low, high = report["nodes"][0].pop("clock_ms")
    assert low <= 0 <= high and report["nodes"] == [{"node": "dgx-7", "ranks": [0], "allreduce": []}]
    assert report["ranks"] == [{"rank": 0, "local_rank": 0, "node": "dgx-7", "gemm_tflops": 0.5, "copy_gbs": 12.0}]
    assert report["floors"] == asdict(Floors(None, None, floor, 12.0)) and report["pairs"] == report["allreduce"] == []
    assert (report["time_ms"], report["seconds"], report["attempt"]) == (1780, 7.3, None)
    assert report["software"] == {"torch": torch.__version__}
    assert (report["backend"], report["dtype"], report["device"]) == ("gloo", "fp32", "cpu")
    output = capsys.readouterr()
    verdict = "healthy" if code is None else "below a floor"
    assert report["verdict"] == verdict
    assert output.out.startswith(f"{verdict}: nodes 1, ranks 1, fp32 over gloo, measured in 7 s\n")
    if code is not None:
        account = json.loads((tmp_path / run_files.rank_error("health", 0)).read_text())
        assert (account["rule"], account["where"]) == ("HW-01", "dgx-7, local rank 0")


def search_result(kind: str, *nodes: str, rail: int | None = 1, **changes: Any) -> Search:
    """Return the result of a search: after 4 rounds, this part is slow."""
    part = SlowPart(kind, nodes, rail, 0.9987)
    return replace(Search(4, 8.1, True, 0.9987, (part,), nodes[-1:], 341.2), **changes)


@pytest.mark.parametrize(
    ("result", "verdict", "where", "fix"),
    [
        (
            search_result("nic", "dgx-1"),
            "Slow, after 4 rounds: the network adapter of local rank 1 on dgx-1 (confidence 99.9 %); without dgx-1, "
            "the others reach 341 GB/s",
            "dgx-1",
            "exclude the node (--exclude=dgx-1), and run `ibstat` there",
        ),
        (
            search_result("link", "dgx-0", "dgx-2", rail=None, others_busbw_gbs=None),
            "Slow, after 4 rounds: the connection between dgx-0 and dgx-2 (confidence 99.9 %)",
            "dgx-0, dgx-2",
            "exclude the node (--exclude=dgx-2), which is one end of the connection, and run `ibdiagnet` there",
        ),
        (
            search_result("rail", excluded=(), others_busbw_gbs=None),
            "Slow, after 4 rounds: the rail of local rank 1 on all nodes (confidence 99.9 %)",
            "dgx-0, dgx-1, dgx-2",
            "check the switch of this rail: run `ibdiagnet`",
        ),
        (
            search_result("gpu", "dgx-1", decided=False, excluded=(), others_busbw_gbs=None),
            "The measurements do not show what is slow, after 4 rounds; suspected: the GPU of local rank 1 on dgx-1",
            "dgx-1",
            "run the check again while no other job uses the network, or with more nodes",
        ),
        (
            Search(4, 8.1, True, 0.97, (), (), None),
            "No node and no link is slower than the others, after 4 rounds: the network is slow, or the floor too high",
            "dgx-0, dgx-1, dgx-2",
            "check the shared network and cluster.health.busbw_gbs; NCCL_DEBUG=INFO shows if NCCL uses InfiniBand",
        ),
    ],
)
def test_the_verdict_of_a_search_is_in_the_finding_and_in_the_table(
    result: Search, verdict: str, where: str, fix: str
) -> None:
    report = floors.judged(health_report(allreduce=(AllReduceRate(124, 1.0, 90.0),), search=result))
    (finding,) = report.findings
    assert finding.what == f"all ranks together reach 90 GB/s all-reduce bus bandwidth; the floor is 300. {verdict}"
    assert (finding.where, finding.fix, report.slow_nodes) == (where, fix, result.excluded)
    assert floors.table(report).splitlines()[-1] == verdict
    assert node_facts.loads(node_facts.dumps(report), type(report)) == report


def test_the_first_finding_fails_the_check_and_the_others_are_counted() -> None:
    report = floors.judged(health_report(floors=Floors(None, None, 700.0, None)))
    health.require(health_report())
    with pytest.raises(BenchError) as raised:
        health.require(report)
    first = report.findings[0]
    assert raised.value.what == f"{first.what} (and 2 more in health.json)"
    assert (raised.value.where, raised.value.fix, raised.value.rule) == (first.where, first.fix, "HW-01")
    with pytest.raises(BenchError) as alone_:
        health.require(replace(report, findings=report.findings[:1]))
    assert alone_.value.what == first.what


@pytest.mark.parametrize(
    ("num_ranks", "has_rates", "code", "words"),
    [
        (2, True, 1, "NCC-05: 1 ranks were started, but the plan needs 2"),
        (1, False, 2, "the config of cluster local sets no minimum speeds, which the node check needs"),
    ],
)
def test_a_request_that_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    num_ranks: int,
    has_rates: bool,
    code: int,
    words: str,
) -> None:
    planned = composed(tmp_path, num_ranks)
    if not has_rates:
        planned.config.cluster.health = None
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(planned))
    with alone.started(monkeypatch, tmp_path / "plan.json"), pytest.raises(SystemExit, match=str(code)):
        health.main()
    assert words in capsys.readouterr().err and not (tmp_path / "health.json").exists()


@pytest.mark.parametrize("floor", [300.0, 400.0])
def test_every_node_is_described_by_its_first_rank(monkeypatch: pytest.MonkeyPatch, floor: float) -> None:
    """Rank 3 of five on three nodes; the slow node is searched if all ranks are below a floor."""
    names = ["dgx-0", "dgx-1", "dgx-1", "dgx-1", "dgx-2"]
    together = (AllReduceRate(1, 1.0, 350.0), AllReduceRate(2, 1.0, 390.0), AllReduceRate(4, 1.0, 380.0))
    clocks = [[(1_000_000 * rank, 1_000_000 * rank + 500_000)] for rank in range(5)]
    requests: list[Any] = []

    def allreduce(sizes: Sequence[int], device: torch.device, ranks: list[int] | None = None) -> Any:
        requests.append((list(sizes), ranks))
        return together if ranks is None else (AllReduceRate(2, 1.0, 77.0),)

    def gathered(value: Any) -> list[Any]:
        if isinstance(value, str):
            return names
        requests.append(value)
        own = [RankRates(rank, rank, names[rank], gemm_tflops=600.0 + rank, copy_gbs=4000.0) for rank in range(5)]
        inside = [(AllReduceRate(2, 1.0, 100.0 * rank),) for rank in range(5)]
        return [health.Measured(own[rank], inside[rank], clocks[rank]) for rank in range(5)]

    def searched(nodes: dict[str, list[int]], together: Any, rank: int, device: torch.device) -> search.Searched:
        requests.append((nodes, together, rank))
        return search.Searched(search_result("nic", "dgx-1"), (PairRate(("dgx-0", "dgx-1"), 2, 50.0),))

    monkeypatch.setattr(search, "search", searched)
    stand_ins: dict[str, Any] = {"allreduce": allreduce, "gathered": gathered}
    stand_ins |= {"own_rates": lambda device: (603.0, 4000.0), "clock_readings": lambda device: clocks[3]}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(rates, name, stand_in)
    monkeypatch.setattr(health, "node_name", lambda: "dgx-1")
    config = Health(source="", min_mib=1, max_mib=4, busbw_gbs=floor, copy_gbs=3.0)
    report = health.measure(config, Rank(3, 2, 5, "", 0), CPU)
    own = RankRates(3, 2, "dgx-1", gemm_tflops=603.0, copy_gbs=4000.0)
    assert requests[:2] == [([1, 2, 4], None), ([1, 2, 4], [1, 2, 3])]
    assert requests[2] == (own, (AllReduceRate(2, 1.0, 77.0),), clocks[3])
    assert [node.ranks for node in report.nodes] == [(0,), (1, 2, 3), (4,)]
    assert [node.node for node in report.nodes] == list(DGX)
    assert [node.allreduce[0].busbw_gbs for node in report.nodes] == [0.0, 100.0, 400.0]
    assert [node.clock_ms for node in report.nodes] == [(-0.5, 0.5), (0.5, 1.5), (3.5, 4.5)]
    assert [rank.gemm_tflops for rank in report.ranks] == [600.0, 601.0, 602.0, 603.0, 604.0]
    assert report.allreduce == together and report.floors == Floors(floor, None, None, 3.0)
    if floor < 390:
        assert report.pairs == () and report.search is None and len(requests) == 3
    else:
        assert [pair.mib for pair in report.pairs] == [2]
        assert report.search == search_result("nic", "dgx-1")
        assert requests[3] == ({"dgx-0": [0], "dgx-1": [1, 2, 3], "dgx-2": [4]}, together, 3)


def test_on_one_node_ranks_are_measured_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together, requests = (AllReduceRate(1, 1.0, 1.0),), []
    monkeypatch.setattr(rates, "allreduce", lambda *arguments: requests.append(arguments) or together)
    monkeypatch.setattr(rates, "gathered", lambda value: [value] * 2)
    monkeypatch.setattr(rates, "own_rates", lambda device: (1.0, 1.0))
    monkeypatch.setattr(rates, "clock_readings", lambda device: [(0, 1)])
    report = health.measure(Health(source="", min_mib=1, max_mib=1, busbw_gbs=9.0), Rank(0, 0, 2, "", 0), CPU)
    assert requests == [([1], CPU)] and report.nodes[0].allreduce == together and report.pairs == ()


def test_the_platform_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 3))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"NVIDIA H200 {device.index}")
    software = {"torch": torch.__version__, "nccl": "2.27.3"}
    expected = {"backend": "nccl", "dtype": "bf16", "device": "NVIDIA H200 1", "software": software}
    assert health.platform(torch.device("cuda", 1)) == expected


def test_a_barrier_returns_the_slowest_and_clocks_are_read_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone.joined():
        assert rates.slowest(0.25, CPU) == 0.25 and rates.gathered("mine") == ["mine"]
    moments = iter(range(100))
    monkeypatch.setattr(rates, "slowest", lambda seconds, device: next(moments))
    monkeypatch.setattr(time, "time_ns", lambda: next(moments))
    assert rates.clock_readings(CPU) == [(3 * turn, 3 * turn + 2) for turn in range(20)]


@pytest.mark.parametrize(("expected_s", "repeats"), [(0.0001, 20), (0.04, 12), (10.0, 3)])
def test_calls_are_repeated_for_half_a_second(monkeypatch: pytest.MonkeyPatch, expected_s: float, repeats: int) -> None:
    """But at least 3 and at most 20 times; all ranks agree on the numbers."""
    requests, agreed = [], []

    def time_back_to_back(call: Callable[[], object], count: int, device: torch.device) -> list[float]:
        requests.append(count)
        return [expected_s] if count == 1 else [1.0, 5.0, *[3.0] * (count - 2)]

    def agree(seconds: float) -> float:
        agreed.append(seconds)
        return seconds if len(agreed) == 1 else 2 * seconds

    monkeypatch.setattr(timing, "time_back_to_back", time_back_to_back)
    assert rates._median_s(lambda: None, CPU, agree) == 6.0
    assert requests == [1, 1, repeats] and agreed == [expected_s, 3.0]


def test_the_table_of_nodes_and_floors() -> None:
    slow = replace(health_report().ranks[3], gemm_tflops=57.26)
    report = health_report(ranks=(*health_report().ranks[:3], slow, *health_report().ranks[4:]))
    report = replace(report, pairs=(PairRate(("dgx-0", "dgx-2"), 124, 1234.5),), floors=Floors(300.0, None, 575.0, 3.0))
    assert floors.table(floors.judged(report)).splitlines() == [
        "below a floor: nodes 3, ranks 6, bf16 over nccl, measured in 12 s",
        "all-reduce of all ranks, GB/s: 62 MiB 280   124 MiB 350   floor 300",
        "node   all-reduce GB/s  GEMM TFLOP/s  copy GB/s  clock offset ms",
        "dgx-0  340              680           4,200      -1 to 1",
        "dgx-1  340              57.3 to 680   4,200      -1 to 1",
        "dgx-2  340              680           4,200      -1 to 1",
        "floor  -                575           3",
        "pair dgx-0 dgx-2: 1,234 GB/s",
    ]
    alone_ = health_report(allreduce=(), nodes=(HealthNode("dgx-0", (0,), (), (0.0, 0.0)),))
    assert floors.table(alone_).splitlines()[1] == "all-reduce of all ranks, GB/s: -   floor 300"


def test_the_fix_for_two_nodes_and_for_one() -> None:
    report = health_report(allreduce=(AllReduceRate(124, 1.0, 90.0),))
    pair = search_result("link", "dgx-0", "dgx-1", rail=None, excluded=())
    two = floors.judged(replace(report, nodes=report.nodes[:2], ranks=report.ranks[:4], search=pair))
    assert two.findings[-1].fix.startswith("run the check with a third node to find out which node is slow")
    assert two.slow_nodes == () and two.findings[-1].where == "dgx-0, dgx-1"
    one = floors.judged(replace(report, nodes=report.nodes[:1], ranks=report.ranks[:2]))
    assert one.findings[-1].fix.startswith("exclude the node (--exclude=dgx-0)") and one.slow_nodes == ("dgx-0",)
