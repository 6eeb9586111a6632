"""Runs on a real Ray cluster of two nodes: from the command line to a judged log, and broken on the way."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import until
from somebody import SHORT, Run, Somebody

pytestmark = pytest.mark.trains
LONG = "task.training.max_steps=2000"
"""Still trains when the test breaks it."""


def test_a_run_over_two_nodes_is_followed_to_its_verdict(somebody: Somebody) -> None:
    """The data-parallel ranks of one trial are on two nodes; doctor, log, ledger, `runs` and `verify` say what they do
    elsewhere, and where Ray shows the job is printed."""
    checked = json.loads(somebody.types("doctor", *SHORT, "--json").stdout)
    assert checked["tier"] == "login" and checked["fine"], checked
    done = somebody.types(*SHORT, "task.training.max_steps=20", "launch.wait=true", module="bench.launch")
    assert "valid trial: yes" in done.stdout and "/#/jobs/" in done.stderr, done
    (folder,) = (somebody.home / "runs").iterdir()
    run = Run(folder, "")
    assert run.status["outcome"] == "proven", run.output()
    (attempt,) = run.ledger[0]["attempts"]
    assert len(set(attempt["nodes"].split(","))) == 2 and attempt["job"].endswith(somebody.cluster.address)
    (listed,) = (json.loads(line) for line in somebody.types("runs", "--json").stdout.splitlines())
    assert listed["state"] == "proven"
    assert json.loads(somebody.types("verify", folder, "--json").stdout)["verified"]
    assert not run.processes()


@pytest.mark.slow
def test_the_doctor_sees_the_version_the_sizes_of_nodes_and_one_of_them(somebody: Somebody) -> None:
    checked = somebody.types("doctor", *SHORT, "--tier", "canary").stdout
    assert "version: fine  Ray 2." in checked and "nodes: fine  2 nodes, 2 of them with CPU: 2" in checked
    assert "one node, where the ranks run: fine" in checked, checked
    said = somebody.types("doctor", *SHORT, "+cluster.ray.resources.rdma=1", "--json", code=1).stdout
    assert [one["rule"] for one in json.loads(said)["findings"] if one["severity"] == "error"] == ["RAY-03"]


@pytest.mark.slow
def test_the_tiny_task_reaches_its_target_over_two_nodes(somebody: Somebody, tmp_path: Path) -> None:
    """With a base of its own, trained on both nodes as well; the official checkers pass its log."""
    env = somebody.env | {"MODEL": str(tmp_path / "model")}
    words = ("task=lora_tiny", "cluster=ray_test", "launch.wait=true")
    done = replace(somebody, env=env).types(*words, module="bench.launch")
    assert "target reached: yes" in done.stdout and "official rules 5.1.0, open: passed" in done.stdout, done


def test_cancel_ends_the_ranks(somebody: Somebody) -> None:
    run = somebody.launch(LONG)
    somebody.until_trains(run)
    somebody.types("cancel", run.folder)
    somebody.until_ended(run)
    assert run.status["outcome"] == "interrupted" and somebody.why(run)["rule"] == "SLU-08", run.output()


@pytest.mark.faults
def test_a_driver_that_is_killed_ends_the_ranks_and_resume_goes_on(somebody: Somebody) -> None:
    run = somebody.launch("task.training.max_steps=100")
    somebody.until_trains(run)
    for pid in run.processes("bench.backends.ray.driver"):
        os.kill(pid, signal.SIGKILL)
    somebody.until_ended(run)
    found = somebody.why(run)
    assert found["rule"] == "RAY-08" and run.status["outcome"] == "interrupted", found
    somebody.types("resume", run.folder)
    until(lambda: run.status.get("outcome") == "proven", 240, run.output)
    assert [attempt["outcome"] for attempt in run.ledger[0]["attempts"]] == ["interrupted", "proven"]


@pytest.mark.faults
def test_a_trial_that_is_out_of_time_goes_on_with_more(somebody: Somebody) -> None:
    """One of its ranks stands still for more than the minute that the plan gives it."""
    run = somebody.launch("task.training.max_steps=20", "walltime=1")
    somebody.until_trains(run)
    (rank, *_) = run.processes("jobs.tasks.train")
    os.kill(rank, signal.SIGSTOP)
    somebody.until_ended(run)
    assert run.status["outcome"] == "failed" and somebody.why(run)["rule"] == "SLU-07", run.output()
    somebody.types("resume", run.folder, "--walltime", 7)
    until(lambda: run.status.get("outcome") == "proven", 240, run.output)
    request = json.loads((run.folder / "ray_job.json").read_text())
    assert "--walltime 7" in request["entrypoint"]


@pytest.mark.faults
def test_a_worker_that_is_killed_costs_an_attempt(somebody: Somebody) -> None:
    """Its node is there, so the run goes on."""
    run = somebody.launch("task.training.max_steps=60")
    somebody.until_trains(run)
    os.kill(_actors(run)[-1], signal.SIGKILL)
    somebody.until_ended(run)
    assert run.status["outcome"] == "proven", run.output()
    assert [attempt["outcome"] for attempt in run.ledger[0]["attempts"]][-1] == "proven"
    assert len(run.ledger[0]["attempts"]) == 2 and "RAY-06" in (run.folder / "ray.out").read_text()


@pytest.mark.faults
def test_a_node_that_dies_is_waited_for_and_then_named(somebody: Somebody) -> None:
    run = somebody.launch(LONG)
    somebody.until_trains(run)
    somebody.cluster.kill_node("second")
    somebody.until_ended(run, 400)
    found = somebody.why(run)
    assert run.status["outcome"] == "failed" and found["rule"] == "RAY-03", found
    assert "RAY-04" in [other["rule"] for other in found["also"]], found


@pytest.mark.faults
def test_a_run_goes_on_where_a_lost_node_is_replaced(somebody: Somebody) -> None:
    run = somebody.launch("task.training.max_steps=60")
    somebody.until_trains(run)
    somebody.cluster.kill_node("second")
    somebody.cluster.start_node("third")
    somebody.until_ended(run, 400)
    assert run.status["outcome"] == "proven", run.output()


def _actors(run: Run) -> list[int]:
    """Return the processes of the run's actors: the parents of its keepers."""
    return sorted(
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in run.processes("bench.backends.ray.keeper")
    )
