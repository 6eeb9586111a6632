"""The choice of nodes after a node check: leave out the slow ones, and use as many as a trial needs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench.contract import node_facts, node_lists, plan_kinds
from bench.contract.node_facts import AllReduceRate, Health, Search, SlowPart
from bench.contract.plan import Plan
from bench.driver import between_commands, slow_nodes
from bench.driver.slow_nodes import Chosen
from bench.errors import ConfigError
from bench.planning.compose import compose
from bench.runs import ledger
from helpers.nodes import health_report
from jobs.node_checks.floors import judged

SLURM = ("task=lora_tiny", "cluster=slurm_test", "cluster.health.busbw_gbs=300", "launch.replace_slow=true")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    plan = planned()
    (tmp_path / "rank_logs").mkdir()
    (tmp_path / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(tmp_path, plan)
    return tmp_path


def planned(*words: str) -> Plan:
    return compose([*SLURM, "cluster.num_nodes=2", "cluster.spare_nodes=1", *words])


def check(run: Path, *names: str, slow: str = "") -> Health:
    """Write the result of a node check of these nodes, of which one slows the all-reduce."""
    whole = health_report(time_ms=7)
    report = replace(
        whole,
        nodes=tuple(node for node in whole.nodes if node.node in names),
        ranks=tuple(rank for rank in whole.ranks if rank.node in names),
    )
    if slow:
        search = Search(3, 1.0, True, 0.99, (SlowPart("nic", (slow,), 0, 0.99),), (slow,), 350.0)
        report = replace(report, allreduce=(AllReduceRate(124, 1.0, 20.0),), search=search)
    (run / "health.json").write_text(node_facts.dumps(judged(report)))
    return report


def choose(run: Path, plan: Plan, *, passed: bool) -> tuple[Chosen, str]:
    chosen = slow_nodes.choose(run, plan, job="5", check_passed=passed)
    nodes = run / ".nodes"
    return chosen, nodes.read_text().strip() if nodes.exists() else ""


def test_a_slow_node_is_replaced_by_the_spare_and_the_ledger_says_why(run: Path) -> None:
    plan = planned()
    check(run, "dgx-0", "dgx-1", "dgx-2", slow="dgx-1")
    (run / "rank_logs/health_rank_0.error").write_text("{}")
    assert choose(run, plan, passed=False) == (Chosen.check_again, "dgx-0,dgx-2")
    assert not (run / "rank_logs/health_rank_0.error").exists() and (run / "health_before_1.json").exists()
    check(run, "dgx-0", "dgx-2")
    assert choose(run, plan, passed=True) == (Chosen.trials, "dgx-0,dgx-2")
    between_commands.begin_trial(run, plan, plan.trials[0], job="5", nodes="dgx-0,dgx-2")
    (attempt,) = ledger.read(run)[0].attempts
    assert attempt.left_out is not None and list(attempt.left_out) == ["dgx-1"]
    assert attempt.left_out["dgx-1"].startswith("NCC-04: all ranks together reach 20 GB/s")
    assert node_lists.left_out(run, "6") == {}, "another job checks the node again"


def test_unused_spares_are_not_used(run: Path) -> None:
    check(run, "dgx-0", "dgx-1", "dgx-2")
    assert choose(run, planned(), passed=True) == (Chosen.trials, "dgx-0,dgx-1")
    assert (run / ".spares").read_text() == "dgx-2\n", "the ranks may ask for it"


def test_a_second_slow_node_keeps_the_check_that_found_the_first(run: Path) -> None:
    check(run, "dgx-0", "dgx-1", "dgx-2", slow="dgx-1")
    choose(run, planned(), passed=False)
    check(run, "dgx-0", "dgx-2", slow="dgx-2")
    assert choose(run, planned(), passed=False) == (Chosen.start_again, "dgx-2")
    earlier = [json.loads((run / f"health_before_{n}.json").read_text())["slow_nodes"] for n in (1, 2)]
    assert earlier == [["dgx-1"], ["dgx-2"]]


def test_a_lost_node_is_replaced_once_and_never_used_again_in_its_job(run: Path) -> None:
    check(run, "dgx-0", "dgx-1", "dgx-2")
    lose = partial(slow_nodes.use_spare, run, planned(), why="SLU-09: no answer")
    assert lose(job="5", lost=["dgx-0"]) is Chosen.trials and (run / ".nodes").read_text() == "dgx-1,dgx-2\n"
    assert (run / ".spares").read_text() == "\n", "no rank may ask for another one"
    assert lose(job="5", lost=["dgx-1"]) is Chosen.failed
    assert node_lists.left_out(run, "5") == dict.fromkeys(("dgx-0", "dgx-1"), "SLU-09: no answer")
    assert lose(job="6", lost=["dgx-2"]) is Chosen.trials and (run / ".nodes").read_text() == "dgx-0,dgx-1\n"


def test_without_srun_a_node_is_left_out_if_a_spare_is_left(run: Path) -> None:
    """Of the job only; the rank that names a slow node is right about it also if another rank was killed meanwhile."""
    leave_out = partial(slow_nodes.leave_out, run, job="5", is_check=False)
    (run / ".slow_node").write_text("dgx-1\nRUN-26: rank 1 on dgx-1 stayed slow\n")
    assert leave_out(killed_on="dgx-0") is None, "no backend has named a spare"
    (run / ".spares").write_text("dgx-2\n")
    assert leave_out(killed_on="dgx-0") == "RUN-26: rank 1 on dgx-1 stayed slow"
    assert list(node_lists.left_out(run, "5")) == ["dgx-1"] and not node_lists.left_out(run, "6")
    (run / ".slow_node").unlink()
    assert leave_out(killed_on="dgx-0") == "RUN-02: a rank was killed on dgx-0"
    assert leave_out(killed_on=None) is None, "a rank that failed by itself"


def test_without_srun_a_failed_node_check_leaves_out_the_slow_node(run: Path) -> None:
    (run / ".spares").write_text("dgx-2\n")
    check(run, "dgx-0", "dgx-1", slow="dgx-1")
    why = slow_nodes.leave_out(run, job="5", is_check=True, killed_on=None)
    assert why is not None and why.startswith("NCC-04: all ranks together reach 20 GB/s")
    assert (run / "health_before_1.json").exists() and list(node_lists.left_out(run, "5")) == ["dgx-1"]


def test_with_too_few_nodes_the_job_starts_again_without_the_slow_one(run: Path) -> None:
    check(run, "dgx-0", "dgx-1", slow="dgx-1")
    assert choose(run, planned("cluster.spare_nodes=0"), passed=False) == (Chosen.start_again, "dgx-1")


def test_a_check_that_names_no_node_ends_the_job(run: Path) -> None:
    check(run, "dgx-0", "dgx-1", "dgx-2")
    assert choose(run, planned(), passed=False) == (Chosen.failed, "")
    (run / "health.json").write_text("{")
    assert choose(run, planned(), passed=False) == (Chosen.failed, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("launch.replace_slow=false",), "cluster.spare_nodes is 1, but launch.replace_slow is false"),
        (("launch.health=false",), "launch.replace_slow needs the node check"),
        (("cluster.health.busbw_gbs=null",), "launch.replace_slow needs the node check"),
        (("launch.array=true",), "the tasks of the array share a run folder"),
        (("cluster.spare_nodes=-1",), "must be from 0 to 64"),
        (("cluster=ray_test", "cluster.spare_nodes=0"), "on Ray, launch.replace_slow needs spare nodes"),
        (("cluster=kubernetes_test",), "only on Slurm and Ray, but the backend is kubernetes"),
    ],
)
def test_settings_without_an_effect_are_refused(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        planned(*words)
