"""What clusters do to jobs: each ends in the state that tells the truth, is explained, and loses no finished trial."""

import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from user import SHORT, Run, User, training, until

pytestmark = pytest.mark.slurm

TWO_TRIALS = (*SHORT, "recipe.max_steps=200", "trials=2")


def recovered(user: User, run: Run, kept: bytes) -> list[dict[str, str]]:
    """Check that a run has completed by itself after trial 1 was interrupted; return the attempts at it."""
    user.end(run, "COMPLETED")
    assert run.status["outcome"] == "proven" and run.outcomes == ["proven"] * 2, run.output()
    assert [entry["seed"] for entry in run.ledger] == [1, 2]
    assert (run / "result_0.txt").read_bytes() == kept
    assert (run / "result_1.txt").read_text().count('"run_start"') == 1
    assert (run / "attempts/1.1/result_1.txt").exists()
    assert user.why(run)["rule"] is None
    return list(run.ledger[1]["attempts"])


def interrupted_in_its_second_trial(user: User, *overrides: str) -> tuple[Run, bytes]:
    run = user.launch(*TWO_TRIALS, *overrides)
    until(training(run, 1), 300, run)
    return run, (run / "result_0.txt").read_bytes()


def failed(user: User, run: Run, rule: str) -> None:
    """Check that a job says that it failed, and why."""
    user.end(run, "FAILED")
    assert run.status["exit_code"] != 0
    assert user.why(run)["rule"] == rule, f"{run.status}\n{run.output()}"


@pytest.mark.parametrize("node", ["dgx-0", "dgx-1"])
def test_a_node_loses_its_power(user: User, node: str) -> None:
    """Of the batch script, or another one: Slurm requeues the job once the node is down, and it goes on."""
    run, kept = interrupted_in_its_second_trial(user)
    user.cluster.kill_node(node)
    user.cluster.wait_for_state(run.job, ["PENDING", "REQUEUED"], 120)
    user.cluster.start_node(node)
    assert len(recovered(user, run, kept)) == 2


def test_the_time_limit_is_near(user: User) -> None:
    """The job hands itself back to Slurm before it is killed."""
    run, kept = interrupted_in_its_second_trial(
        user, "recipe.max_steps=600", "cluster.slurm.arguments=['--time=2','--signal=B:USR1@75']"
    )
    user.cluster.wait_for_state(run.job, ["PENDING", "REQUEUED"], 150)
    user.cluster.run(["scontrol", "update", f"jobid={run.job}", "timelimit=20"], check=True)
    attempts = recovered(user, run, kept)
    assert attempts[0]["cause"] == "the time limit is near"


def test_another_job_preempts_it(user: User) -> None:
    run, kept = interrupted_in_its_second_trial(user, "cluster.slurm.partition=low")
    user.cluster.run(
        ["sbatch", "-p", "batch", "-N2", "--exclusive", "-t1", "--output=/dev/null", "--wrap=sleep 1"], check=True
    )
    attempts = recovered(user, run, kept)
    assert "preemption" in attempts[0]["cause"]


def test_a_rank_is_killed(user: User) -> None:
    run, kept = interrupted_in_its_second_trial(user)
    pids = subprocess.run(
        ["pgrep", "-f", "jobs.train plan.json --trial 1$"], capture_output=True, text=True, check=True
    )
    ranks = [int(pid) for pid in pids.stdout.split() if belongs(int(pid), run.job)]
    os.kill(ranks[-1], signal.SIGKILL)
    failed(user, run, "RUN-02")
    assert run.outcomes == ["proven", "aborted"] and (run / "result_0.txt").read_bytes() == kept


def belongs(pid: int, job: str) -> bool:
    """Return whether a process is a rank of the job, and not srun or slurmstepd."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"python" in words[0] and f"SLURM_JOB_ID={job}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
        b"\0"
    )


def test_a_rank_raises(user: User) -> None:
    """Its own account says why, in status.json too; the trial after it is not started."""
    run = user.launch(*TWO_TRIALS, "recipe.lr=1e30", "recipe.clip_grad=1e30")
    failed(user, run, "RUN-05")
    assert run.status["rule"] == "RUN-05" and run.outcomes == ["aborted", "planned"]


def test_the_data_vanishes(user: User) -> None:
    """Between two trials: the first one stays, the second one says what is missing."""
    own = replace(user, cache=user.home / "cache")
    shutil.copytree(user.cache, own.cache)
    run = own.launch(*TWO_TRIALS)
    until(training(run, 0), 300, run)
    shutil.rmtree(next(own.cache.glob("tiny_report-*")))
    failed(own, run, "CFG-06")
    assert run.outcomes == ["proven", "aborted"]


def test_the_disk_fills_up(user: User, small_disk: Path) -> None:
    """There is room kept for the last word."""
    own = replace(user, home=small_disk)
    run, kept = interrupted_in_its_second_trial(own)
    with (small_disk / "ballast").open("wb") as ballast, pytest.raises(OSError, match="No space left"):
        while True:
            ballast.write(bytes(4096))
            ballast.flush()
    failed(own, run, "CFG-08")
    assert (run / "result_0.txt").read_bytes() == kept
