"""Node checks by real ranks: unreachable floors fail them, and a slow link is detected."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.contract import node_facts, plan_kinds
from bench.contract.node_facts import AllReduceRate, Floors, HealthNode
from bench.contract.plan import Plan
from bench.contract.schema import Health
from bench.preflight import nodes
from helpers import ranks
from helpers.nodes import NAMES, health_report, on_nodes
from jobs.node_checks import floors, rates

UNREACHED = 1e6


def composed(tmp: Path, num_ranks: int, **floors_: float) -> Plan:
    planned = ranks.compose(
        tmp, "task=pretrain_tiny", f"cluster.ranks_per_node={num_ranks}", "recipe.global_batch_size=12"
    )
    planned.config.cluster.health = Health(source="this test", min_mib=1, max_mib=2, **floors_)
    return planned


def measured(folder: Path, num_nodes: int, per_node: int, **floors_: float) -> tuple[list[tuple[int, str]], Any]:
    """Return how the ranks ended and what they printed, and health.json."""
    (folder / "plan.json").write_text(plan_kinds.dumps(composed(folder, num_nodes * per_node, **floors_)))
    done = on_nodes(folder, "jobs.node_checks.health", "plan.json", size=(num_nodes, per_node), OMP_NUM_THREADS="1")
    return done, json.loads((folder / "health.json").read_text())


@pytest.mark.trains
@pytest.mark.skipif(not ranks.have(2), reason="needs two GPUs")
def test_without_floors_it_measures_and_judges_nothing(tmp_path: Path):
    [(code, table), (other, output)], report = measured(tmp_path, 1, 2)
    assert (code, other) == (0, 0), (table, output)
    assert "not judged" in table and "1 MiB" in table and not output
    assert [row["mib"] for row in report["allreduce"]] == [1, 2]
    for row in report["allreduce"]:
        assert math.isclose(row["busbw_gbs"], row["mib"] * 2**20 / row["ms"] / 1e6, rel_tol=0.02, abs_tol=1e-3)
    assert all(rank["gemm_tflops"] > 0 and rank["copy_gbs"] > 0 for rank in report["ranks"])
    assert (report["findings"], report["slow_nodes"], report["pairs"]) == ([], [], [])
    assert not list(tmp_path.glob("rank_logs/*.error"))


@pytest.mark.trains
@pytest.mark.skipif(not ranks.have(3), reason="needs three GPUs")
def test_below_a_floor_every_rank_fails_for_the_same_reason(tmp_path: Path):
    done, report = measured(tmp_path, 3, 1, busbw_gbs=UNREACHED)
    assert [code for code, _ in done] == [1, 1, 1]
    accounts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank_logs/health_rank_?.error"))]
    assert len(accounts) == 3 and len({(a["what"], a["where"], a["fix"]) for a in accounts}) == 1
    assert accounts[0]["rule"] == "NCC-04" and accounts[0]["what"].startswith("all ranks together reach ")
    names = ("dgx-0", "dgx-1", "dgx-2")
    assert {frozenset(pair["nodes"]) for pair in report["pairs"]} == {frozenset(two) for two in combinations(names, 2)}
    assert report["search"]["rounds"] <= 5
    assert all(low <= 0 <= high for low, high in (node["clock_ms"] for node in report["nodes"])), (
        "one machine, one clock"
    )
    findings = nodes.judge(composed(tmp_path, 3), nodes.load(tmp_path))
    assert [f.what for f in findings if f.rule == "NCC-04"] == [report["findings"][0]["what"]]
    assert nodes.slow_nodes(nodes.load(tmp_path)) == report["slow_nodes"]


@pytest.mark.trains
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc") or ranks.DEVICE != "cpu", reason="needs root and tc")
def test_the_node_behind_a_slow_link_is_named(tmp_path: Path):
    planned = composed(tmp_path, 4, busbw_gbs=0.05)
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(planned))
    with networks(slow=2) as wrap:
        env = os.environ | planned.environment | {"PYTHONPATH": str(ranks.ROOT), "WORLD_SIZE": "4"}
        env |= {"MASTER_ADDR": "10.99.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        started = [
            subprocess.Popen(
                [*wrap(rank), sys.executable, "-m", "jobs.node_checks.health", "plan.json"],
                cwd=tmp_path,
                env=env | {"RANK": str(rank), "LOCAL_RANK": "0", "SLURMD_NODENAME": NAMES[rank]},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(4)
        ]
        done = ranks.finish(started, timeout_s=300)
    assert [code for code, _ in done] == [1, 1, 1, 1], done
    assert nodes.slow_nodes(nodes.load(tmp_path)) == ["dgx-2"]
    assert "exclude the node (--exclude=dgx-2)" in done[0][1]


@contextmanager
def networks(*, slow: int) -> Iterator[Any]:
    """Four network namespaces on one bridge, one of them at 160 Mbit/s; yields what a command is wrapped in."""
    own = [f"bench{os.getpid()}-{n}" for n in range(4)]
    bridge = f"bench{os.getpid()}-b"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", bridge, "link", "set", "br0", "up")
        for n, name in enumerate(own):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{n}", "netns", bridge)
            ip("-n", name, "addr", "add", f"10.99.0.{n + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", bridge, "link", "set", f"p{n}", "master", "br0")
            ip("-n", bridge, "link", "set", f"p{n}", "up")
        limit = "qdisc add dev eth0 root tbf rate 160mbit burst 256kb latency 100ms"
        subprocess.run(["ip", "netns", "exec", own[slow], "tc", *limit.split()], check=True)
        yield lambda rank: ["ip", "netns", "exec", own[rank]]
    finally:
        for name in [*own, bridge]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize(("bounds", "words"), [((1200.0, 1300.0), "1.2 s ahead of"), ((-9e3, -2500.0), "2.5 s behind")])
def test_a_wrong_clock_is_reported(tmp_path: Path, bounds: tuple[float, float], words: str):
    def write(*clock_ms: tuple[float, float]) -> list[str]:
        clocks = [HealthNode(name, (), (), ms) for name, ms in zip(NAMES, clock_ms, strict=False)]
        (tmp_path / "health.json").write_text(node_facts.dumps(health_report(nodes=tuple(clocks))))
        return [
            f"{f.where} {f.what}" for f in nodes.judge(composed(tmp_path, 2), nodes.load(tmp_path)) if f.rule == "HW-06"
        ]

    assert write((-1.0, 1.0), (-5000.0, 900.0)) == [], "it may be correct"
    [output] = write((-1.0, 1.0), bounds)
    assert output.startswith(f"dgx-1 the clock of this node is at least {words}")


@pytest.mark.starts
def test_a_missing_rank_is_reported(tmp_path: Path):
    late = tmp_path / "late.py"
    late.write_text("from jobs.node_checks import health, rates\nrates.MEETING_S = 2\nhealth.main()\n")
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(composed(tmp_path, 2)))
    [(code, output)] = on_nodes(tmp_path, "late", "plan.json", size=(1, 1), WORLD_SIZE="2")
    assert code == 1 and "NCC-05: rendezvous at 127.0.0.1" in output


def verdict(report: node_facts.Health) -> tuple[str, list[tuple[str, str]], tuple[str, ...]]:
    actual = floors.judged(report)
    return actual.verdict, [(f.rule, f.where) for f in actual.findings], actual.slow_nodes


def test_slow_nodes_are_listed_unless_all_are_slow():
    assert verdict(health_report()) == ("healthy", [], ()), "the best size counts"
    assert verdict(health_report(floors=Floors(None, None, None, None)))[0] == "not judged: no floors"

    sound = health_report()
    ranks_ = [replace(rank, gemm_tflops=400.0) if rank.rank == 3 else rank for rank in sound.ranks]
    slow_node = replace(sound.nodes[2], allreduce=(AllReduceRate(124, 1.0, 100.0),))
    one_each = replace(sound, ranks=tuple(ranks_), nodes=(*sound.nodes[:2], slow_node))
    expected = [("HW-01", "dgx-1, local rank 1"), ("NCC-04", "dgx-2")]
    assert verdict(one_each) == ("below a floor", expected, ("dgx-1", "dgx-2"))

    slow_everywhere = tuple(replace(rank, gemm_tflops=500.0) for rank in one_each.ranks)
    assert verdict(replace(one_each, ranks=slow_everywhere))[2] == (), "a floor that no node reaches excludes none"


def test_a_rate_that_equals_its_floor_is_healthy():
    """A floor is the lowest rate that is accepted."""
    sound = health_report()
    rates_ = {"busbw_gbs": 350.0, "node_busbw_gbs": 340.0, "gemm_tflops": 680.0, "copy_gbs": 4200.0}
    assert verdict(replace(sound, floors=Floors(**rates_)))[:2] == ("healthy", [])
    for name, rate in rates_.items():
        floors_ = Floors(**rates_ | {name: math.nextafter(rate, math.inf)})
        assert verdict(replace(sound, floors=floors_))[0] == "below a floor", name


def test_a_single_rank_has_no_all_reduce_and_breaks_no_floor_of_it():
    alone = health_report(allreduce=(), nodes=(HealthNode("dgx-0", (0,), (), (0.0, 0.0)),))
    assert verdict(alone)[:2] == ("healthy", [])


@given(st.integers(-(10**10), 10**10), st.lists(st.tuples(*[st.integers(0, 10**7)] * 4), min_size=1))
def test_bounds_of_a_clock_hold_what_it_is_ahead(ahead_ns: int, delays: list[tuple[int, int, int, int]]):
    own, other, now = [], [], 10**18
    for mine_before, their_before, mine_after, their_after in delays:
        now += 10**9  # the time at which all have arrived
        own.append((now - mine_before + ahead_ns, now + mine_after + ahead_ns))
        other.append((now - their_before, now + their_after))
    low, high = rates.clock_bounds_ms(own, other)
    assert low - 0.001 <= ahead_ns / 1e6 <= high + 0.001
