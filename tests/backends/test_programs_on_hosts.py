"""engine=command on hosts over ssh, and in podman: two ranks of one program."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import preflight
from bench.diagnosis import explain
from bench.planning import compose
from bench.runs import status as statuses
from helpers import podman, programs, sshd

Spawn = Callable[..., "subprocess.Popen[str]"]


def launched(tmp: Path, spawn: Spawn, *words: str) -> str:
    paths = {name: str(tmp) for name in ("DATADIR", "MODEL", "LOGDIR")}
    process = spawn([sys.executable, "-m", "bench", "launch", *words, f"launch.folder={tmp}/run"], paths)
    return process.communicate(timeout=280)[0]


@sshd.needs_sshd
@pytest.mark.starts
@pytest.mark.slow
def test_ranks_on_two_hosts_train_and_one_that_fails_explains_the_run(tmp_path: Path, spawn: Spawn) -> None:
    with sshd.booted(tmp_path / "sshd") as hosts:
        for failing, outcome in ((-1, "valid"), (1, "failed")):
            folder = tmp_path / outcome
            folder.mkdir()
            output = launched(folder, spawn, *hosts.overrides, *programs.words(folder, failing=failing))
            status = statuses.read(folder / "run")
            assert status is not None and status.outcome == outcome, output
    first = (tmp_path / "valid/run/rank_logs/trial_0_rank_1.out").read_text().splitlines()[0]
    assert first == "rank 1 of 2, local rank 0, node 1"
    assert "ValueError: rank 1 has no rows" in str(explain([tmp_path / "failed/run"]).evidence)


@podman.needs_podman
@pytest.mark.starts
@pytest.mark.slow
def test_ranks_in_an_image_train(tmp_path: Path, spawn: Spawn) -> None:
    words = programs.words(tmp_path)
    mounts = next(override for override in podman.overrides(tmp_path) if override.startswith("container.mounts="))
    own = f'{mounts.removesuffix("]")},"{tmp_path}:{tmp_path}:ro"]'
    mounted = [own if override == mounts else override for override in podman.overrides(tmp_path)]
    here = ("cluster.device=cpu", "cluster.gpu=null", "cluster.ranks_per_node=2")
    output = launched(tmp_path, spawn, *here, *words, *mounted)
    status = statuses.read(tmp_path / "run")
    assert status is not None and status.outcome == "valid", output
    first = (tmp_path / "run/rank_logs/trial_0_rank_1.out").read_text().splitlines()[0]
    assert first == "rank 1 of 2, local rank 1, node 0"


@pytest.mark.parametrize(("mounts", "is_warned"), [("[]", True), ("['{0}']", False), ("['{0}:/elsewhere']", True)])
def test_a_script_that_no_mount_puts_into_the_container_is_named_before_the_run(
    mounts: str, is_warned: bool, tmp_path: Path
) -> None:
    paths = [f"cluster.paths.{name}=/{name}" for name in ("data", "model", "logs")]
    container = ("container=podman", "container.image=me/train:1", f"container.mounts={mounts.format(tmp_path)}")
    plan = compose.compose([*programs.words(tmp_path), "cluster=local", "cluster.device=cpu", *paths, *container])
    warnings = [item.what for item in preflight.inspect(plan) if item.rule == "RUN-08" and item.severity == "warning"]
    assert [f"the file {tmp_path}/ranks.py" in what for what in warnings] == [True] * is_warned
