"""A study on a real Slurm: its runs share one job, and the same command resumes it after any interruption."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import Cluster
from user import User, until

from helpers import answers

pytestmark = pytest.mark.slurm
STUDY = ("study", "tiny", "cluster=slurm_test", "walltime=10")


def ledgers(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/ledger.json"))}


def valid_runs(folder: Path) -> list[str]:
    return [name for name, entries in ledgers(folder).items() if entries[0]["outcome"] == "valid"]


def jobs(folder: Path) -> set[str]:
    """Return the jobs that started attempts."""
    return {attempt["job"] for entries in ledgers(folder).values() for attempt in entries[0].get("attempts", [])}


@pytest.mark.slow
def test_a_study_resumes_after_its_job_is_cancelled_and_its_command_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    """Random weights need no cache, so that this user has none."""
    user = User(cluster, tmp_path / "cache", tmp_path)
    folder = user.home / "runs/studies/tiny-slurm_test"
    argv = [sys.executable, "-m", "bench", *STUDY, "launch.wait=true"]
    with subprocess.Popen(argv, env=user.env, cwd=user.home, start_new_session=True) as first:
        until(lambda: len(valid_runs(folder)) >= 1, 300)
        os.killpg(first.pid, signal.SIGKILL)  # the job keeps running
    job = json.loads((folder / "job.1/job.json").read_text())["jobs"][0]["id"]
    second = user.types(*STUDY, "--json")
    assert len(json.loads((folder / "job.1/job.json").read_text())["jobs"]) == 1 and not (folder / "job.2").exists()
    assert answers.one(second.stdout)["name"] == "tiny"
    until(lambda: sum(entries[0]["outcome"] == "running" for entries in ledgers(folder).values()) == 1, 300)
    cluster.run(["scontrol", "requeue", job], check=True)
    until(lambda: len(valid_runs(folder)) >= 2, 400)  # the same job, requeued, skips finished runs
    outcomes = [entry["outcome"] for entries in ledgers(folder).values() for entry in entries[0].get("attempts", [])]
    assert outcomes.count("interrupted") == 1 and {job} == jobs(folder)
    user.types("cancel", folder / "job.1")
    user.cluster.wait_for_state(job, ("CANCELLED", "COMPLETED", "FAILED"), 120)
    before = {name: entries[0]["attempts"] for name, entries in ledgers(folder).items() if name in valid_runs(folder)}
    assert 2 <= len(before) < 6
    result = answers.one(user.types(*STUDY, "launch.wait=true", "--json").stdout)
    assert [len(cell["values"]) for row in result["rows"] for cell in row["cells"].values()] == [3] * 6
    assert result["differences"][0]["comparison"]["verdict"] != "not compared"
    after = {name: entries[0]["attempts"] for name, entries in ledgers(folder).items()}
    assert {name: after[name] for name in before} == before, "valid runs are not run again"
    assert len(jobs(folder)) == 2
    assert len(valid_runs(folder)) == 6
