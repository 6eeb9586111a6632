"""Ranks in containers, by real Pyxis and Enroot.

They need a test cluster with Pyxis (RUNSTOP_SLURM_PLUGSTACK), and an image with Python 3.11 and the engine
(RUNSTOP_SLURM_IMAGE). Other packages are mounted from this environment.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from user import SHORT_RUN, User, image_of, in_container

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="session")  # created before the cache of trials, so that a skip trains nothing
def image(cluster: Cluster) -> str:
    image, reason = image_of(cluster)
    if reason:
        pytest.skip(reason)
    return image


def test_ranks_run_in_the_image_on_every_node(image: str, user: User) -> None:
    """They train and are judged there; the facts record the image; no container remains."""
    run = user.launch(*SHORT_RUN, *in_container(image), "task.training.max_steps=20")
    user.end(run, "COMPLETED")
    assert run.outcomes == ["valid"], run.output()
    facts = [json.loads(path.read_text()) for path in sorted((run / "facts").iterdir())]
    assert [rank["node"] for rank in facts] == ["dgx-0", "dgx-1"]
    assert all(rank["software"]["in_enroot"] and rank["software"]["executable"] != sys.executable for rank in facts)
    left = user.cluster.run(["srun", "-N2", "bash", "-c", "enroot list 2>/dev/null || true"]).stdout
    assert f"runstop-{run.job}" not in left


def test_a_missing_mount_source_is_explained(image: str, user: User) -> None:
    run = user.launch(*SHORT_RUN, *in_container(image)[:2], "container.mounts=['/nowhere/data:/nowhere/data:ro']")
    user.end(run, "FAILED")
    assert run.status["exit_code"] != 0 and user.why(run)["rule"] == "PYX-07", run.output()


def test_ranks_outside_of_the_image_are_refused(image: str, user: User, tmp_path: Path) -> None:
    """A site whose Pyxis ignores the flags: the ranks would train with whatever the node has."""
    text = user.types("render", *SHORT_RUN, *in_container(image), "task.training.max_steps=20").stdout
    script = tmp_path / "on_host.sbatch"
    script.write_text(text.replace('${container[@]+"${container[@]}"}', ""))
    assert script.read_text() != text
    path = {
        "PATH": f"{Path(sys.executable).parent}:{user.cluster.env['PATH']}"
    }  # so that there is a Python that could train
    on_host = replace(user, cluster=replace(user.cluster, env=user.cluster.env | path)).sbatch(script)
    user.end(on_host, "FAILED")
    assert user.why(on_host)["rule"] == "PYX-03", on_host.output()
