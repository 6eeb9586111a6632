"""What clusters do to jobs: each ends in the state that tells the truth, is explained, and loses no finished trial."""

import json
import os
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from user import SHORT, Run, User, training, until

pytestmark = pytest.mark.slurm

TWO_TRIALS = (*SHORT, "task.training.max_steps=100", "trials=2")
REQUEUED = ["PENDING", "REQUEUED"]


def recovered(user: User, run: Run, kept: bytes) -> list[dict[str, str]]:
    """Check that a run has completed by itself after trial 1 was interrupted; return the attempts at it."""
    user.end(run, "COMPLETED")
    assert run.status["outcome"] == "proven" and run.outcomes == ["proven"] * 2, run.output()
    assert [entry["seed"] for entry in run.ledger] == [1, 2]
    assert (run / "result_0.txt").read_bytes() == kept
    attempts = list(run.ledger[1]["attempts"])
    logs = [run / "result_1.txt", *(run / f"attempts/1.{n}/result_1.txt" for n in range(1, len(attempts)))]
    assert all(log.read_text().count('"run_start"') == 1 for log in logs)
    assert user.why(run)["rule"] is None
    return attempts


def interrupted_in_its_second_trial(user: User, *overrides: str) -> tuple[Run, bytes]:
    run = user.launch(*TWO_TRIALS, *overrides)
    until(training(run, 1), 300, run)
    return run, (run / "result_0.txt").read_bytes()


def interrupted_again(run: Run, attempts: int) -> None:
    """Wait until the second trial trains once more."""
    until(lambda: len(run.ledger[1]["attempts"]) == attempts and training(run, 1)(), 300, run)


def failed(user: User, run: Run, rule: str, *, state: str = "FAILED") -> None:
    """Check that a job says that it failed, and why."""
    user.end(run, state)
    assert run.status["exit_code"] != 0
    assert user.why(run)["rule"] == rule, f"{run.status}\n{run.output()}"


def ranks(run: Run) -> list[int]:
    """Return the process ids of the ranks that train the second trial."""
    found = subprocess.run(["pgrep", "-f", "plan.json --trial 1$"], capture_output=True, text=True, check=True)
    return [
        int(pid)
        for pid in found.stdout.split()
        if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        and Path(f"/proc/{pid}/cwd").resolve() == run.folder.resolve()
    ]


@pytest.mark.faults
def test_a_node_loses_its_power_and_then_the_other_one(user: User) -> None:
    """Slurm requeues the job once a node is down, the batch script's or another one, and it goes on."""
    run, kept = interrupted_in_its_second_trial(user)
    for attempt, node in enumerate(("dgx-1", "dgx-0"), start=1):
        interrupted_again(run, attempt)
        user.cluster.kill_node(node)
        user.cluster.wait_for_state(run.job, REQUEUED, 120)
        user.cluster.start_node(node)
    assert len(recovered(user, run, kept)) == 3


@pytest.mark.faults
def test_the_time_limit(user: User) -> None:
    """Warned early, a job requeues itself; one too short for a trial fails, and so does a trial beyond its walltime."""
    endless = (*SHORT, "task.training.max_steps=20000")
    slow, short = user.launch(*endless, "walltime=1"), user.launch(*endless)
    until(training(short, 0), 300, short)
    limit(user, short, 2)
    warned, kept = interrupted_in_its_second_trial(user)
    hung = [os.kill(pid, signal.SIGSTOP) for pid in ranks(warned)]
    assert len(hung) == 2
    limit(user, warned, 2)
    user.cluster.wait_for_state(warned.job, REQUEUED, 150)
    limit(user, warned, 20)
    attempts = recovered(user, warned, kept)
    assert attempts[0]["cause"] == "SLU-07: the time limit is near"
    for run in (slow, short):
        failed(user, run, "SLU-07")
        assert run.outcomes == ["aborted"]


def limit(user: User, run: Run, minutes: int) -> None:
    user.cluster.run(["scontrol", "update", f"jobid={run.job}", f"timelimit={minutes}"], check=True)


@pytest.mark.faults
def test_other_jobs_preempt_it(user: User) -> None:
    """Without a grace time Slurm requeues it; with one, Slurm stops its ranks and leaves the rest to the script."""
    run, kept = interrupted_in_its_second_trial(user, "cluster.slurm.partition=low")
    for attempt, grace_s in enumerate((0, 60), start=1):
        interrupted_again(run, attempt)
        user.cluster.run(["scontrol", "update", "partition=low", f"gracetime={grace_s}"], check=True)
        urgent = ["sbatch", "-p", "batch", "-N2", "--exclusive", "-t1", "--output=/dev/null", "--wrap=sleep 1"]
        user.cluster.run(urgent, check=True)
        user.cluster.wait_for_state(run.job, REQUEUED, 60)
    user.cluster.run(["scontrol", "update", "partition=low", "gracetime=0"], check=True)
    causes = [attempt.get("cause", "") for attempt in recovered(user, run, kept)]
    assert "PREEMPTION" in causes[0] and causes[1:] == ["SLU-10: preempted", ""]


def test_a_rank_is_killed(user: User) -> None:
    run, kept = interrupted_in_its_second_trial(user)
    os.kill(ranks(run)[-1], signal.SIGKILL)
    failed(user, run, "RUN-02")
    assert run.outcomes == ["proven", "aborted"] and (run / "result_0.txt").read_bytes() == kept


def test_a_rank_raises(user: User) -> None:
    """Its own account says why, in status.json too; the trial after it is not started."""
    run = user.launch(*TWO_TRIALS, "recipe.lr=1e30", "recipe.clip_grad=1e30")
    failed(user, run, "RUN-05")
    assert run.status["rule"] == "RUN-05" and run.outcomes == ["aborted", "planned"]


def test_the_data_vanishes_and_another_runs_folder(user: User) -> None:
    """Between two trials: the first stays, the second says what is missing. Without a folder only the state is left."""
    own = replace(user, cache=user.home / "cache")
    shutil.copytree(user.cache, own.cache)
    run, removed = own.launch(*TWO_TRIALS), user.launch(*TWO_TRIALS)
    until(lambda: training(run, 0)() and training(removed, 0)(), 300, run)
    for rows in own.cache.glob("tiny_report-*"):
        shutil.rmtree(rows)
    shutil.rmtree(removed.folder)
    failed(own, run, "CFG-06")
    assert run.outcomes == ["proven", "aborted"]
    user.end(removed, "FAILED")


def test_elements_of_an_array_are_cancelled_and_gone_on_with(user: User) -> None:
    """The other one ends as if nothing had happened; the last one to end writes the status of all."""
    run = user.launch(*TWO_TRIALS, "launch.array=true")
    until(training(run, 1), 300, run)
    user.cluster.run(["scancel", f"{run.job}_1"], check=True)
    user.end(replace(run, job=f"{run.job}_0"), "COMPLETED")
    assert run.outcomes[0] == "proven" and not run.status
    assert json.loads(user.types("runs", "--json").stdout)["state"] == "CANCELLED"
    kept = (run / "result_0.txt").read_bytes()
    user.types("resume", run.folder)
    until(lambda: run.status, 300, run)
    assert run.status["outcome"] == "proven" and (run / "result_0.txt").read_bytes() == kept
    assert [entry["outcome"] for entry in run.ledger[1]["attempts"]] == ["interrupted", "proven"]


def test_a_folder_has_one_job_at_a_time_and_one_script(user: User, tmp_path: Path) -> None:
    """A second job in the folder leaves everything as it is; once the first one has ended, there is nothing to do."""
    script, other, said = tmp_path / "one.sbatch", tmp_path / "other.sbatch", tmp_path / "said"
    script.write_text(user.types("render", *SHORT, "task.training.max_steps=100").stdout)
    other.write_text(user.types("render", *SHORT, "task.training.max_steps=100", "seed_base=5").stdout)
    run = user.sbatch(script)
    until(training(run, 0), 300, run)
    for words, answer in ((script, f"job {run.job} works in"), (other, f"job {run.job} works in")):
        user.end(user.sbatch(words, run.folder, output=said), "FAILED")
        assert answer in said.read_text()
    user.end(run, "COMPLETED")
    kept = (run / "result_0.txt").read_bytes()
    user.end(user.sbatch(other, run.folder, output=said), "FAILED")
    assert "another script made" in said.read_text()
    user.end(user.sbatch(script, run.folder, output=said), "COMPLETED")
    assert (run / "result_0.txt").read_bytes() == kept and run.status["outcome"] == "proven"
    assert [entry["seed"] for entry in run.ledger] == [1]


def test_the_disk_fills_up(user: User, small_disk: Path) -> None:
    """There is room kept for the last word."""
    own = replace(user, home=small_disk)
    run, kept = interrupted_in_its_second_trial(own)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError, match="No space left"):
        while True:
            ballast.write(bytes(1 << 20))
    failed(own, run, "CFG-08")
    assert (run / "result_0.txt").read_bytes() == kept
