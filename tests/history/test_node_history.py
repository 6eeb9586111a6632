"""`runstop nodes` lists what runs found out about nodes, and cluster.avoid=auto leaves out those that are bad."""

import json
import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.backends.kubernetes import manifest
from bench.backends.slurm import checks, script
from bench.cli import main
from bench.console import plan as plan_sheets
from bench.contract import mllog, node_facts, plan_kinds
from bench.errors import ConfigError
from bench.history import node_verdicts
from bench.history.avoid import bad_nodes
from bench.planning import avoided_nodes
from bench.planning.compose import compose
from bench.rules.check import Answer, Finding, Subject
from bench.runs import ledger
from bench.runs import status as statuses
from bench.runs.ledger import Outcome
from bench.runs.status import Ending, Status
from helpers.facts import SOUND
from helpers.nodes import health_report
from jobs.node_checks.floors import judged

DAY_MS, NOW_S = 86_400_000, 1_790_000_000
SLURM = ("task=lora_tiny", "cluster=slurm_test", "cluster.num_nodes=2")
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("LOGDIR", str(tmp_path / "runs"))
    monkeypatch.setattr("time.time", lambda: float(NOW_S))

    def write(name: str, *, days_ago: float, slow: str = "", output: str = "") -> Path:
        """Write a run on dgx-0 to dgx-2 with a node check; one node is slow, or the run fails with an output."""
        plan, folder, time_ms = compose(SLURM), tmp_path / "runs" / name, int(NOW_S * 1000 - days_ago * DAY_MS)
        (folder / "facts").mkdir(parents=True)
        (folder / "plan.json").write_text(plan_kinds.dumps(plan))
        ledger.create(folder, plan)
        for one in SOUND:
            facts = node_facts.dumps(replace(one, time_ms=time_ms))
            (folder / "facts" / f"rank_{one.rank}.json").write_text(facts)
        report = health_report(time_ms=time_ms)
        ranks = tuple(replace(rank, gemm_tflops=300.0) if rank.node == slow else rank for rank in report.ranks)
        (folder / "health.json").write_text(node_facts.dumps(judged(replace(report, ranks=ranks))))
        if output:
            (folder / "slurm-7.out").write_text(output)
            statuses.write(folder, Status(outcome=Ending.failed, exit_code=1, what="trial 0 failed"))
            os.utime(folder / "status.json", (time_ms / 1000 + 60, time_ms / 1000 + 60))
        return folder

    return write


def nodes(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["nodes", *words])
    output = capsys.readouterr()
    assert stop.value.code == code, output
    return output.out + output.err


def listed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, Any]]:
    every = [json.loads(line) for line in nodes(capsys, *words, "--json").splitlines()]
    return {one["node"]: one for one in every}


def avoided(*words: str) -> dict[str, str]:
    return compose([*SLURM, *words], bad_nodes=bad_nodes).config.cluster.avoided


@pytest.mark.long
def test_a_slow_node_is_left_out_until_it_passes_a_check_or_the_time_is_over(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    write("good", days_ago=9)
    write("bad", days_ago=3, slow="dgx-2")
    every = listed(capsys)
    assert {name: (one["passed_checks"], len(one["findings"])) for name, one in every.items()} == {
        "dgx-2": (1, 1),
        "dgx-0": (1, 0),
        "dgx-1": (1, 0),
    }
    (finding,) = every["dgx-2"]["findings"]
    assert (finding["kind"], finding["rule"]) == ("slow", "HW-01") and "the lowest: 300" in finding["what"]
    assert every["dgx-2"]["is_left_out"] and not every["dgx-0"]["is_left_out"]
    assert list(listed(capsys, "--bad")) == ["dgx-2"] and listed(capsys, "--bad", "--within", "2d") == {}
    assert list(avoided("cluster.avoid=auto")) == ["dgx-2"]
    assert avoided("cluster.avoid=auto", "cluster.avoid_within=2d") == avoided() == {}
    table = nodes(capsys)
    assert "dgx-2\tslurm\t2\t1\t1\t0\t" in table and "HW-01: a GPU has a hardware error) in bad" in table
    write("repaired", days_ago=1)
    assert avoided("cluster.avoid=auto") == {} and listed(capsys)["dgx-2"]["findings"] == [finding]


@pytest.mark.long
def test_the_newest_finding_on_a_node_of_the_same_backend_is_the_reason(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, days_ago in (("second", 1.0), ("first", 2.0), ("good", 3.0)):
        write(name, days_ago=days_ago, slow="" if name == "good" else "dgx-2")
    assert avoided("cluster.avoid=auto")["dgx-2"].endswith(" in second")
    assert next(iter(every := listed(capsys))) == "dgx-2" and every["dgx-2"]["runs"][-1].endswith("second")
    assert every["dgx-2"]["last_seen"] == "2026-09-20T14:13:20Z"
    on_kubernetes = ["task=lora_tiny", "cluster=kubernetes", "cluster.avoid=auto"]
    assert compose(on_kubernetes, bad_nodes=bad_nodes).config.cluster.avoided == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "accused"),
    [
        ("srun: error: Node failure on dgx-1", ["dgx-1"]),
        ("srun: error: Node failure on dgx-10", []),
        ("2: srun: error: Node failure on dgx-0", ["dgx-0"]),
        ("2: NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", ["dgx-1"]),
        ("SLU-09: Slurm has marked dgx-1 as down; the next attempt of the trial uses dgx-0,dgx-2", ["dgx-1"]),
        ("slurmstepd: error: *** JOB 7 ON dgx-0 CANCELLED AT 2026-09-21T10:00:00 DUE TO NODE FAILURE, SEE LOG ***", []),
        ("1: torch.OutOfMemoryError: CUDA out of memory on dgx-1", []),
    ],
    ids=["named", "of another run", "named by another rank", "by its rank", "not its spares", "whole job", "program"],
)
def test_a_node_is_blamed_only_for_what_it_causes(write: Write, line: str, accused: list[str]) -> None:
    write("failed", days_ago=1, output=f"{line}\n")
    assert list(avoided("cluster.avoid=auto")) == accused


@pytest.mark.long
def test_a_node_that_was_lost_during_a_trial_is_a_failure_of_a_run_that_succeeded(write: Write) -> None:
    folder = write("continued", days_ago=1)
    lost = {"dgx-1": "SLU-09: no answer from dgx-1", "dgx-0": "RUN-02: a rank was killed on dgx-0"}
    entries = {name: {"why": why, "time_ms": 1, "job": "7"} for name, why in lost.items()}
    (folder / "left_out.json").write_text(json.dumps(entries))
    statuses.write(folder, Status(outcome=Ending.valid, exit_code=0))
    assert list(avoided("cluster.avoid=auto")) == ["dgx-1"]


@pytest.mark.long
@pytest.mark.parametrize(("ending", "is_retried"), [(Ending.valid, True), (Ending.interrupted, False)])
def test_a_node_that_interrupted_a_run_is_a_failure(write: Write, ending: Ending, is_retried: bool) -> None:
    """Also if the run continued on other nodes, and succeeded."""
    folder = write("interrupted", days_ago=1, output="srun: error: Node failure on dgx-1\n")
    trial = compose(SLURM).trials[0]
    for outcome in (Outcome.interrupted, Outcome.valid) if is_retried else ():
        assert ledger.begin(folder, trial, attempts=9, job="7")
        ledger.end(folder, 0, outcome)
    statuses.write(folder, Status(outcome=ending, exit_code=0))
    assert list(avoided("cluster.avoid=auto")) == ["dgx-1"]


def test_without_nodes_the_list_says_why(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    root = write("20261201-lora_tiny-slurm_test-aaaa", days_ago=1).parent
    assert "leaves out none of these nodes" in nodes(capsys, "--bad")
    assert "only runs on other machines have nodes" in nodes(capsys, "--folder", str(root.parent))


@pytest.mark.long
def test_a_run_on_this_machine_says_nothing_about_nodes(write: Write) -> None:
    folder = write("local", days_ago=1)
    assert node_verdicts.of_run(folder)
    (folder / "plan.json").write_text(plan_kinds.dumps(compose(["task=lora_tiny", "cluster=local"])))
    assert node_verdicts.of_run(folder) == ()


@pytest.mark.long
def test_a_node_that_was_slow_during_a_trial_is_a_finding_of_a_valid_run(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write("trained", days_ago=8)
    with mllog.Writer(folder / "result_0.txt") as log:
        log.event("slow_ranks", [2, 3], node="dgx-1", cause="computation", own_ms=220.0, usual_ms=200, step=40)
        log.event("slow_ranks", "damaged", node=None)
    (finding,) = listed(capsys)["dgx-1"]["findings"]
    assert (finding["kind"], finding["rule"]) == ("slow", "RUN-26")
    assert finding["what"] == "slow computation during a trial: 220 ms, others 200 ms"


@pytest.mark.long
def test_a_list_of_nodes_reaches_every_backend_and_the_plan_says_why(tmp_path: Path) -> None:
    words = ("cluster.avoid=[dgx-7,dgx-9]", 'cluster.slurm.arguments=["--exclude=dgx-1"]')
    plan = compose([*SLURM, *words])
    assert "#SBATCH --exclude='dgx-7,dgx-9'" in script.script(plan)
    assert "--exclude=dgx-1,dgx-7,dgx-9" in script.sbatch_arguments(plan, tmp_path)
    assert ("left out", "dgx-7: listed in cluster.avoid; dgx-9: listed in cluster.avoid") in plan_sheets.rows(plan)
    on_kubernetes = compose(["task=lora_tiny", "cluster=kubernetes", "cluster.avoid=[dgx-7]"])
    assert re.search(r"operator: NotIn\n +values:\n +- dgx-7\n", manifest.text(on_kubernetes))
    hosts = ("task=lora_tiny", "cluster=hosts", "cluster.ranks_per_node=1", "cluster.device=cpu")
    listed_hosts = compose([*hosts, "cluster.hosts=[a,b:1x1,c]", "cluster.num_nodes=2", "cluster.avoid=[b]"])
    assert listed_hosts.config.cluster.hosts == ["a", "c"]
    with pytest.raises(ConfigError, match=r"without b, only 1 node can be used, but the run needs 2 nodes \(b: listed"):
        compose([*hosts, "cluster.hosts=[a,b]", "cluster.num_nodes=2", "cluster.avoid=[b]"])


def test_times_are_in_minutes_hours_or_days() -> None:
    texts = ("90m", "12h", "7d")
    assert [avoided_nodes.seconds(text, where="") for text in texts] == [90 * 60, 12 * 3600, 7 * 86_400]


@pytest.mark.parametrize(
    ("own", "sent"),
    [
        (["-xdgx-1"], ["-xdgx-1,dgx-7"]),
        (["-x", "dgx-1"], ["-x", "dgx-1,dgx-7"]),
        (["--exclude", "dgx-1", "--exclusive"], ["--exclude", "dgx-1,dgx-7", "--exclusive"]),
        (["--constraint", "h100"], ["--constraint", "h100"]),
    ],
)
def test_a_users_own_exclude_does_not_replace_the_nodes_to_leave_out(
    own: list[str], sent: list[str], tmp_path: Path
) -> None:
    plan = compose([*SLURM, "cluster.avoid=[dgx-7]", f"cluster.slurm.arguments={json.dumps(own)}"])
    assert script.sbatch_arguments(plan, tmp_path)[-len(sent) :] == sent


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            ("cluster.avoid=atuo",),
            "cluster.avoid is 'atuo', but must be auto or a list of node names: did you mean auto",
        ),
        (("cluster.avoid=['dgx-[1-3]']",), "is not the name of a node"),
        (("cluster.avoid=['a --wrap=id']",), "is not the name of a node"),
        (("cluster.avoid=auto", "cluster.avoid_within=week"), "'week' is not a duration above 0"),
        (("cluster=local", "cluster.avoid=auto"), "leaves out nodes, but backend local runs only on this machine"),
        (("cluster.avoid=auto", "cluster.avoid_within=0d"), "'0d' is not a duration above 0"),
        ((f"cluster.avoid=[{','.join(f'n{n}' for n in range(201))}]",), "would leave out 201 nodes, but at most 200"),
    ],
)
def test_wrong_values_are_refused(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose([*SLURM, *words])
    assert what in refused.value.what


def slurm_says(plan: Any, nodes: str) -> list[Finding | str]:
    answers = {}
    for name, out in (("sinfo", "batch*|up|60|3|gpu:8|64|500000|idle|1-infinite\n"), (checks.NODES, nodes)):
        answers[name] = Future[Answer]()
        answers[name].set_result(Answer(0, out, ""))
    return list(checks.left_out(Subject(plan, "", answers=answers)))


def test_slurm_has_too_few_nodes_left_or_does_not_know_one() -> None:
    plan, every = compose([*SLURM, "cluster.avoid=[n1,n9]"]), "n0|batch*\nn1|batch*\nn2|batch*\nn9|other\n"
    assert slurm_says(plan, every) == ["n1, n9; 2 nodes left"]
    (_, few) = slurm_says(plan, every.replace("n2|batch*\n", ""))
    assert isinstance(few, Finding) and few.what.startswith(
        "without n1, n9, only 1 node can be used, but the run needs 2"
    )
    (unknown,) = slurm_says(plan, every.replace("n9|other\n", ""))
    assert isinstance(unknown, Finding) and unknown.what == "Slurm has no node n9, so sbatch refuses the job"
    assert unknown.fix == "set cluster.avoid=[n1]"
