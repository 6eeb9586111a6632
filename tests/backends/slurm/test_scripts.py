"""The scripts in sbatch/ with a real sbatch, and the display of a pending job."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from user import SHORT_RUN, User

from helpers import answers

pytestmark = pytest.mark.slurm
SCRIPTS = sorted((Path(__file__).parents[3] / "sbatch").glob("*.sbatch"))
TOO_LARGE = ("Node count specification invalid", "Requested node configuration is not available")
"""Refusals that are allowed, since this cluster is small."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_sbatch_accepts_every_option_of_the_scripts_in_sbatch(cluster: Cluster, script: Path) -> None:
    done = cluster.run(["sbatch", "--test-only", script])
    refused = done.returncode != 0 and not any(reason in done.stderr for reason in TOO_LARGE)
    assert not refused, done.stderr
    if script.stem.endswith(("slurm_test", "dgx1", "dgx2", "dgxh200")):
        assert done.returncode == 0, done.stderr


@pytest.fixture
def closed(cluster: Cluster) -> Iterator[str]:
    """A partition that is down, so that jobs stay pending."""
    cluster.run(["scontrol", "update", "partition=low", "state=down"], check=True)
    yield "low"
    cluster.run(["scontrol", "update", "partition=low", "state=up"], check=True)


def test_a_pending_job_shows_its_reason_and_can_be_cancelled(user: User, closed: str) -> None:
    run = user.launch(*SHORT_RUN, f"cluster.slurm.partition={closed}")
    waits = answers.one(user.types("watch", run.folder, "--once", "--json").stdout)["trials"][0]
    assert waits["note"] == f"waiting for job {run.job}: PENDING (PartitionDown)"
    user.types("cancel", run.folder)
    user.end(run, "CANCELLED")
    assert run.status["outcome"] == "interrupted"
    listed = answers.one(user.types("runs", "--json").stdout)
    assert (listed["state"], listed["job_state"], listed["rule"]) == ("interrupted", "CANCELLED", "SLU-08")


def test_forced_preflight_errors_are_recorded(user: User, closed: str) -> None:
    overrides = [*SHORT_RUN, f"cluster.slurm.partition={closed}", "+cluster.environment.SITE_TOKEN=abc"]
    assert "CFG-07" in user.types(*overrides, module="bench.launch", code=2).stderr
    assert not [*user.home.glob("runs/*")]
    run = user.launch(*overrides, "launch.force=true")
    forced = json.loads((run / "job.json").read_text())["forced"]
    assert any(text.startswith("CFG-07") for text in forced)
