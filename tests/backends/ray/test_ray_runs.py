"""Runs on a real Ray cluster of two nodes: from the command line to a judged log, and with injected faults."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import until
from ray_user import SHORT_RUN, RayUser, Run

from helpers import answers

pytestmark = pytest.mark.trains
LONG_RUN = "task.training.max_steps=2000"
"""Still trains when the test breaks it."""


def test_a_run_over_two_nodes_is_followed_to_its_verdict(user: RayUser) -> None:
    """The data-parallel ranks of one trial are on two nodes; doctor, log, ledger, `runs` and `verify` behave as with
    other backends, and the URL of the job on Ray's dashboard is printed."""
    checked = answers.one(user.types("doctor", *SHORT_RUN, "--json").stdout)
    assert checked["tier"] == "login" and checked["passed"], checked
    done = user.types(*SHORT_RUN, "task.training.max_steps=20", "launch.wait=true", module="bench.launch")
    assert "valid trial: yes" in done.stdout and "/#/jobs/" in done.stderr, done
    (folder,) = (user.home / "runs").iterdir()
    run = Run(folder, "")
    assert run.status["outcome"] == "valid", run.output()
    (attempt,) = run.ledger[0]["attempts"]
    assert len(set(attempt["nodes"].split(","))) == 2 and attempt["job"].endswith(user.cluster.address)
    listed = answers.one(user.types("runs", "--json").stdout)
    assert listed["state"] == "valid"
    assert answers.one(user.types("verify", folder, "--json").stdout)["passed"]
    assert not run.processes()


@pytest.mark.slow
def test_the_doctor_checks_version_node_sizes_and_one_node(user: RayUser) -> None:
    checked = user.types("doctor", *SHORT_RUN, "--tier", "canary").stdout
    assert "version: passed  Ray 2." in checked and "nodes: passed  2 nodes, 2 of them with CPU: 2" in checked
    assert "one node, inside the container: passed" in checked, checked
    output = user.types("doctor", *SHORT_RUN, "+cluster.ray.resources.rdma=1", "--json", code=1).stdout
    assert [one["rule"] for one in answers.one(output)["findings"] if one["severity"] == "error"] == ["RAY-03"]


@pytest.mark.slow
def test_the_tiny_task_reaches_its_target_over_two_nodes(user: RayUser, tmp_path: Path) -> None:
    """With a base of its own, trained on both nodes as well; the official checkers pass its log."""
    env = user.env | {"MODEL": str(tmp_path / "model")}
    words = ("task=lora_tiny", "cluster=ray_test", "launch.wait=true")
    done = replace(user, env=env).types(*words, module="bench.launch")
    assert "target reached: yes" in done.stdout and "MLPerf checker 5.1.0, open division: passed" in done.stdout, done


def test_cancel_ends_the_ranks(user: RayUser) -> None:
    run = user.launch(LONG_RUN)
    user.until_trains(run)
    user.types("cancel", run.folder)
    user.until_ended(run)
    assert run.status["outcome"] == "interrupted" and user.why(run)["rule"] == "SLU-08", run.output()


@pytest.mark.faults
def test_a_killed_driver_ends_the_ranks_and_resume_continues_the_run(user: RayUser) -> None:
    run = user.launch("task.training.max_steps=100")
    user.until_trains(run)
    for pid in run.processes("bench.backends.ray.driver"):
        os.kill(pid, signal.SIGKILL)
    user.until_ended(run)
    cause = user.why(run)
    assert cause["rule"] == "RAY-08" and run.status["outcome"] == "interrupted", cause
    user.types("resume", run.folder)
    until(lambda: run.status.get("outcome") == "valid", 240, run.output)
    assert [attempt["outcome"] for attempt in run.ledger[0]["attempts"]] == ["interrupted", "valid"]


@pytest.mark.faults
def test_the_node_of_a_killed_rank_is_replaced_by_the_spare_node(user: RayUser) -> None:
    """In the same job, from the newest checkpoint; both nodes stay reserved."""
    spare = ("cluster.num_nodes=1", "cluster.spare_nodes=1", "launch.replace_slow=true")
    run = user.launch("task.training.max_steps=200", "task.training.checkpoint_every_steps=20", *spare)
    until(lambda: any(run.folder.glob("checkpoints/trial_0/step_*[0-9]")), 240, run.output)
    for pid in run.processes("jobs.tasks.train"):
        os.kill(pid, signal.SIGKILL)
    until(lambda: run.status.get("outcome") == "valid", 240, run.output)
    first, second = run.ledger[0]["attempts"]
    why = f"RUN-02: a rank was killed on {first['nodes']}"
    assert first["cause"] == f"{why}; the next attempt uses a spare node"
    assert second["left_out"] == {first["nodes"]: why} and second["checkpoint"] >= 20
    assert first["job"] == second["job"] and first["nodes"] != second["nodes"]


@pytest.mark.faults
def test_a_killed_rank_ends_the_run_with_its_cause(user: RayUser) -> None:
    """The run's final status is written on a node, with the code that the job has uploaded."""
    run = user.launch(LONG_RUN)
    user.until_trains(run)
    os.kill(run.processes("jobs.tasks.train")[0], signal.SIGKILL)
    user.until_ended(run)
    assert (run.status["outcome"], run.status["exit_code"], run.status["rule"]) == ("failed", 1, "RUN-02"), run.output()
    assert user.why(run)["rule"] == "RUN-02"


@pytest.mark.faults
def test_a_timed_out_trial_is_resumed_with_a_longer_limit(user: RayUser) -> None:
    """One of its ranks is stopped for longer than the plan's limit of one minute."""
    run = user.launch("task.training.max_steps=20", "walltime=1")
    user.until_trains(run)
    (rank, *_) = run.processes("jobs.tasks.train")
    os.kill(rank, signal.SIGSTOP)
    user.until_ended(run)
    assert run.status["outcome"] == "failed" and user.why(run)["rule"] == "SLU-07", run.output()
    user.types("resume", run.folder, "--walltime", 7)
    until(lambda: run.status.get("outcome") == "valid", 240, run.output)
    request = json.loads((run.folder / "ray_job.json").read_text())
    assert "--walltime 7" in request["entrypoint"]


@pytest.mark.faults
def test_a_worker_that_is_killed_costs_an_attempt(user: RayUser) -> None:
    """Its node still works, so the run continues."""
    run = user.launch("task.training.max_steps=60")
    user.until_trains(run)
    os.kill(_actors(run)[-1], signal.SIGKILL)
    user.until_ended(run)
    assert run.status["outcome"] == "valid", run.output()
    assert [attempt["outcome"] for attempt in run.ledger[0]["attempts"]][-1] == "valid"
    assert len(run.ledger[0]["attempts"]) == 2 and "RAY-06" in (run.folder / "ray.out").read_text()


@pytest.mark.faults
def test_a_dead_node_that_is_not_replaced_fails_the_run(user: RayUser) -> None:
    run = user.launch(LONG_RUN)
    user.until_trains(run)
    user.cluster.kill_node("second")
    user.until_ended(run, 400)
    cause = user.why(run)
    assert run.status["outcome"] == "failed" and cause["rule"] == "RAY-03", cause
    assert "RAY-04" in [other["rule"] for other in cause["also"]], cause


@pytest.mark.faults
def test_a_run_continues_when_a_lost_node_is_replaced(user: RayUser) -> None:
    run = user.launch("task.training.max_steps=60")
    user.until_trains(run)
    user.cluster.kill_node("second")
    user.cluster.start_node("third")
    user.until_ended(run, 400)
    assert run.status["outcome"] == "valid", run.output()


def _actors(run: Run) -> list[int]:
    """Return the processes of the run's actors: the parents of its supervisors."""
    return sorted(
        int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        for pid in run.processes("bench.backends.ray.supervisor")
    )
