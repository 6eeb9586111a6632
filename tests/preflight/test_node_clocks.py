"""Clocks of nodes are compared by bounds: a reported skew is never larger than the real one."""

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
    ("ahead_ms", "messages"),
    [
        ((0, 0, 0), []),
        ((0, 900, -100), []),
        ((0, -8000, 0, 0), ["dgx-1: the clock of this node is at least 8.0 s behind the clock of dgx-0"]),
        ((0, 7_200_000), ["dgx-1: the clock of this node is at least 7,200.0 s ahead of the clock of dgx-0"]),
        ((9000, 0, 0), ["dgx-0: the clock of this node is at least 9.0 s ahead of the clock of dgx-1"]),
    ],
)
def test_nodes_that_differ_by_more_than_a_second_are_reported(ahead_ms: tuple[int, ...], messages: list[str]) -> None:
    problems = judged(*nodes_ahead(*ahead_ms))
    assert [f"{finding.where}: {finding.what}" for finding in problems] == messages
    assert all((finding.rule, finding.severity) == ("HW-06", "warning") for finding in problems)


@given(
    ahead_ms=st.integers(-20_000, 20_000),
    server_ms=st.integers(-(10**6), 10**6),
    delays_ms=st.lists(st.integers(0, 3000), min_size=4, max_size=4),
    coarse_ms=st.sampled_from([1, 4, 10, 1000]),
    later_ms=st.integers(0, 5000),
)
@example(ahead_ms=1500, server_ms=877, delays_ms=[0] * 4, coarse_ms=1000, later_ms=999)
def test_the_reported_skew_is_never_larger_than_the_real_one(
    ahead_ms: int, server_ms: int, delays_ms: list[int], coarse_ms: int, later_ms: int
) -> None:
    """With a server that truncates its times, writes that take up to 6 s, and a node that starts later."""

    def clock(ahead: int, before: int, after: int) -> FileTime:
        at_server = NOW_MS + server_ms + (later_ms if ahead else 0) + before
        at_node = NOW_MS + ahead + (later_ms if ahead else 0)
        return FileTime(at_node, at_server - at_server % coarse_ms, at_node + before + after)

    ranks = [rank_of("a", 0, clock(0, *delays_ms[:2])), rank_of("b", 1, clock(ahead_ms, *delays_ms[2:]))]
    messages = [finding.what for finding in judged(*ranks)]
    blur_ms = sum(delays_ms) + 2 * 1000
    if messages:
        reported_s = float(messages[0].removeprefix("the clock of this node is at least ").split(" s ")[0])
        assert reported_s * 1000 <= abs(ahead_ms) + 50, "it is printed to a tenth of a second"
        assert ("ahead of" in messages[0]) == (ahead_ms > 0)
    else:
        assert abs(ahead_ms) <= 1000 + blur_ms


def test_file_times_from_the_nodes_own_clock_report_no_skew() -> None:
    own = [
        replace(written(0), before_ms=NOW_MS + n, file_ms=NOW_MS + n + 7, after_ms=NOW_MS + n + 9) for n in (0, 8000)
    ]
    assert judged(*(rank_of(name, n, time) for n, (name, time) in enumerate(zip(NAMES, own, strict=False)))) == []


def test_facts_with_a_future_time_show_a_clock_that_is_ahead() -> None:
    ranks = [rank_of("a", 0, None), rank_of("b", 1, None, time_ms=NOW_MS + 7_200_000)]
    (finding,) = judged(*ranks)
    assert finding.where == "b" and finding.what.startswith(
        "the clock of this node is at least 7,195.0 s ahead of the clock of "
    )


def test_bounds_from_collectives_take_precedence_over_files() -> None:
    both = (HealthNode("dgx-0", (0,), (), (-1.0, 1.0)), HealthNode("dgx-1", (1,), (), (2990.0, 3010.0)))
    (finding,) = judged(*nodes_ahead(0, 0), health=health_report(nodes=both))
    assert finding.what == "the clock of this node is at least 3.0 s ahead of the clock of dgx-0"


@pytest.mark.parametrize(
    ("clock_ms", "seconds"),
    [
        ((1000.0, 1100.0), None),
        ((1001.0, 1100.0), "1.0 s ahead of"),
        ((1500.0, 9000.0), "1.5 s ahead of"),
        ((-1100.0, -1000.0), None),
        ((-1100.0, -1001.0), "1.0 s behind"),
        ((-9000.0, -1500.0), "1.5 s behind"),
    ],
)
def test_a_second_is_the_largest_difference_that_is_not_reported(
    clock_ms: tuple[float, float], seconds: str | None
) -> None:
    both = (HealthNode("dgx-0", (0,), (), (-500.0, 500.0)), HealthNode("dgx-1", (1,), (), clock_ms))
    findings = judged(*nodes_ahead(0, 0), health=health_report(nodes=both))
    expected = [f"the clock of this node is at least {seconds} the clock of dgx-0"] if seconds else []
    assert [one.what for one in findings] == expected, "rank 0's own clock is the shared one, without any bounds"


@pytest.mark.parametrize(("ahead_ms", "is_reported"), [(1000, False), (1001, True)])
def test_facts_may_be_a_second_later_than_the_clock_of_the_reader(ahead_ms: int, is_reported: bool) -> None:
    findings = judged(rank_of("a", 0, None, time_ms=NOW_MS + ahead_ms), read_ms=NOW_MS)
    assert [one.where for one in findings] == ["a"] * is_reported


def test_the_reference_is_the_first_of_the_clocks_that_most_others_agree_with() -> None:
    findings = judged(*nodes_ahead(5000, 0, 5100, 400), read_ms=NOW_MS)
    assert [one.where for one in findings] == ["dgx-1", "dgx-3"]
    findings = judged(*nodes_ahead(5000, 0, 200, 400), read_ms=NOW_MS)
    assert [one.where for one in findings] == ["dgx-0"]


def test_a_files_time_is_between_two_readings_of_the_clock(tmp_path: Path) -> None:
    """With a real file system, whose times are those of the last timer tick."""
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
    loaded = nodes.load(tmp_path)
    assert loaded.ranks == (rank_of("a", 0, None),)
    assert list(clocks.clocks(plan(), loaded)) == []
