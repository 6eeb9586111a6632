"""Faults that the fault matrix (faults.py) cannot express: arrays, and several jobs in one folder."""

from dataclasses import replace
from pathlib import Path

import pytest
from user import SHORT_RUN, User, training, until

from helpers import answers

pytestmark = pytest.mark.slurm
ONE_NODE = (*SHORT_RUN, "cluster.num_nodes=1", "task.training.max_steps=100")


def test_cancelled_array_tasks_can_be_resumed(user: User) -> None:
    """The other task ends normally; the last task to end writes the status of the run."""
    run = user.launch(*ONE_NODE, "trials=2", "launch.array=true")
    until(training(run, 1), 300, run)
    user.cluster.run(["scancel", f"{run.job}_1"], check=True)
    user.end(replace(run, job=f"{run.job}_0"), "COMPLETED")
    assert run.outcomes[0] == "valid" and not run.status
    assert answers.one(user.types("runs", "--json").stdout)["state"] == "CANCELLED"
    kept = (run / "result_0.txt").read_bytes()
    user.types("resume", run.folder)
    until(lambda: run.status, 300, run)
    assert run.status["outcome"] == "valid" and (run / "result_0.txt").read_bytes() == kept
    attempts = [(entry["outcome"], entry.get("cause")) for entry in run.ledger[1]["attempts"]]
    assert attempts == [("interrupted", "SLU-08: the job was cancelled"), ("valid", None)]


def test_a_run_folder_accepts_one_job_at_a_time_and_one_script(user: User, tmp_path: Path) -> None:
    """A second job in the folder leaves everything as it is; once the first one has ended, there is nothing to do."""
    script, other, output = tmp_path / "one.sbatch", tmp_path / "other.sbatch", tmp_path / "output"
    script.write_text(user.types("render", *ONE_NODE).stdout)
    other.write_text(user.types("render", *ONE_NODE, "seed_base=5").stdout)
    run = user.sbatch(script)
    until(training(run, 0), 300, run)
    for words, answer in ((script, f"job {run.job} is using"), (other, f"job {run.job} is using")):
        user.end(user.sbatch(words, run.folder, output=output), "FAILED")
        assert answer in output.read_text()
    user.end(run, "COMPLETED")
    kept = (run / "result_0.txt").read_bytes()
    user.end(user.sbatch(other, run.folder, output=output), "FAILED")
    assert "was created by another script" in output.read_text()
    user.end(user.sbatch(script, run.folder, output=output), "COMPLETED")
    assert (run / "result_0.txt").read_bytes() == kept and run.status["outcome"] == "valid"
    assert [entry["seed"] for entry in run.ledger] == [1]
