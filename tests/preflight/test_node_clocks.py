"""Clocks of nodes are compared by bounds: what is claimed is never more than the truth, and seconds are found."""

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.contract import node_facts
from bench.contract.node_facts import FileTime, HealthNode, RankFacts
from bench.contract.plan import Plan
from bench.planning import compose
from bench.preflight import nodes
from bench.preflight.nodes import clocks
from bench.preflight.nodes.load import Facts
from bench.rules.finding import Finding
from helpers.facts import MACHINE, RANK
from helpers.nodes import NAMES, health_report
from jobs.node_checks import facts as writer

NOW_MS = 1_790_000_000_123


@cache
def plan() -> Plan:
    return compose.compose(["task=pretrain_tiny", "cluster=local"])


def rank_of(node: str, number: int, clock: FileTime | None, *, time_ms: int = NOW_MS) -> RankFacts:
    machine = replace(MACHINE, results=replace(MACHINE.results, clock=clock))
    return replace(RANK, rank=number, node=node, hostname=node, time_ms=time_ms, machine=machine)


def judged(*ranks: RankFacts, health: node_facts.Health | None = None, read_ms: int = NOW_MS + 5000) -> list[Finding]:
    return list(clocks.clocks(plan(), Facts("facts", ranks, health, read_ms=read_ms)))


def written(ahead_ms: int, *, took_ms: int = 20, server_ms: int = 0) -> FileTime:
    """Return the times of a file that was written at NOW_MS by a file server's clock."""
    return FileTime(NOW_MS + ahead_ms, NOW_MS + server_ms + took_ms // 2, NOW_MS + ahead_ms + took_ms)


def nodes_ahead(*ahead_ms: int) -> list[RankFacts]:
    return [rank_of(name, n, written(ms)) for n, (name, ms) in enumerate(zip(NAMES, ahead_ms, strict=False))]


@pytest.mark.parametrize(
    ("ahead_ms", "said"),
    [
        ((0, 0, 0), []),
        ((0, 900, -100), []),
        ((0, -8000, 0, 0), ["dgx-1: its clock is at least 8.0 s behind that of dgx-0"]),
        ((0, 7_200_000), ["dgx-1: its clock is at least 7,200.0 s ahead of that of dgx-0"]),
        ((9000, 0, 0), ["dgx-0: its clock is at least 9.0 s ahead of that of dgx-1"]),
    ],
)
def test_nodes_that_differ_by_more_than_a_second_are_named(ahead_ms: tuple[int, ...], said: list[str]) -> None:
    found = judged(*nodes_ahead(*ahead_ms))
    assert [f"{finding.where}: {finding.what}" for finding in found] == said
    assert all((finding.rule, finding.severity) == ("HW-06", "warning") for finding in found)


@given(
    ahead_ms=st.integers(-20_000, 20_000),
    server_ms=st.integers(-(10**6), 10**6),
    delays_ms=st.lists(st.integers(0, 3000), min_size=4, max_size=4),
    coarse_ms=st.sampled_from([1, 4, 10, 1000]),
    later_ms=st.integers(0, 5000),
)
@example(ahead_ms=1500, server_ms=877, delays_ms=[0] * 4, coarse_ms=1000, later_ms=999)
def test_what_is_claimed_is_never_more_than_the_truth(
    ahead_ms: int, server_ms: int, delays_ms: list[int], coarse_ms: int, later_ms: int
) -> None:
    """A server that cuts its times off, writes that take up to 6 s, and a node that begins later."""

    def clock(ahead: int, before: int, after: int) -> FileTime:
        at_server = NOW_MS + server_ms + (later_ms if ahead else 0) + before
        at_node = NOW_MS + ahead + (later_ms if ahead else 0)
        return FileTime(at_node, at_server - at_server % coarse_ms, at_node + before + after)

    ranks = [rank_of("a", 0, clock(0, *delays_ms[:2])), rank_of("b", 1, clock(ahead_ms, *delays_ms[2:]))]
    found = [finding.what for finding in judged(*ranks)]
    blur_ms = sum(delays_ms) + 2 * 1000
    if found:
        claimed_s = float(found[0].removeprefix("its clock is at least ").split(" s ")[0])
        assert claimed_s * 1000 <= abs(ahead_ms) + 50, "it is printed to a tenth of a second"
        assert ("ahead of" in found[0]) == (ahead_ms > 0)
    else:
        assert abs(ahead_ms) <= 1000 + blur_ms


def test_a_file_system_whose_times_are_the_nodes_own_proves_nothing() -> None:
    own = [
        replace(written(0), before_ms=NOW_MS + n, file_ms=NOW_MS + n + 7, after_ms=NOW_MS + n + 9) for n in (0, 8000)
    ]
    assert judged(*(rank_of(name, n, time) for n, (name, time) in enumerate(zip(NAMES, own, strict=False)))) == []


def test_facts_from_the_future_are_of_a_clock_that_is_ahead() -> None:
    ranks = [rank_of("a", 0, None), rank_of("b", 1, None, time_ms=NOW_MS + 7_200_000)]
    (finding,) = judged(*ranks)
    assert finding.where == "b" and finding.what.startswith("its clock is at least 7,195.0 s ahead of that of ")


def test_collectives_know_better_than_files() -> None:
    both = (HealthNode("dgx-0", (0,), (), (-1.0, 1.0)), HealthNode("dgx-1", (1,), (), (2990.0, 3010.0)))
    (finding,) = judged(*nodes_ahead(0, 0), health=health_report(nodes=both))
    assert finding.what == "its clock is at least 3.0 s ahead of that of dgx-0"


def test_a_file_is_timed_between_two_looks_at_the_clock(tmp_path: Path) -> None:
    """By a real file system, whose times are those of the last timer tick."""
    began_ms = time.time() * 1000
    clock = writer.results(tmp_path).clock
    assert clock is not None
    assert began_ms - 1 <= clock.before_ms <= clock.file_ms + 10 <= clock.after_ms + 10 <= time.time() * 1000 + 10
    assert list(tmp_path.iterdir()) == []


def test_older_facts_have_no_clock_and_stay_readable(tmp_path: Path) -> None:
    older = json.loads(node_facts.dumps(rank_of("a", 0, None)))
    del older["machine"]["results"]["clock"]
    (tmp_path / "facts").mkdir()
    (tmp_path / "facts" / "rank_0000.json").write_text(json.dumps(older))
    found = nodes.load(tmp_path)
    assert found.ranks == (rank_of("a", 0, None),)
    assert list(clocks.clocks(plan(), found)) == []
