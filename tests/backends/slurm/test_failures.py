"""What clusters and users do to runs that no row of the fault matrix (faults.py) can say: arrays, several jobs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from user import SHORT, User, training, until

pytestmark = pytest.mark.slurm
ONE_NODE = (*SHORT, "cluster.num_nodes=1", "task.training.max_steps=100")


def test_elements_of_an_array_are_cancelled_and_gone_on_with(user: User) -> None:
    """The other one ends as if nothing had happened; the last one to end writes the status of all."""
    run = user.launch(*ONE_NODE, "trials=2", "launch.array=true")
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
    script.write_text(user.types("render", *ONE_NODE).stdout)
    other.write_text(user.types("render", *ONE_NODE, "seed_base=5").stdout)
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
