"""Runs of engine=huggingface that end early or cannot start have the same verdicts as runs of engine=megatron."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bench.contract import mllog
from bench.diagnosis import explain
from bench.mlperf import reader
from helpers import ranks
from helpers.huggingface_runs import BLOCK, FSDP2, needed

needed()
pytestmark = [pytest.mark.trains, pytest.mark.slow, pytest.mark.skipif(ranks.DEVICE != "cpu", reason="gloo ranks")]

Launch = Callable[..., "subprocess.Popen[str]"]
ENDINGS = {
    "SIGTERM": (signal.SIGTERM, "launcher", 143, "interrupted", "RUN-24"),
    "a rank is killed": (signal.SIGKILL, "rank", 1, "failed", "RUN-02"),
}
"""As in tests/launch/test_launch.py."""


@pytest.fixture
def launch(runs: Path, spawn: Launch) -> Launch:
    """Start a long run with prepared rows and base."""

    def start(*overrides: str) -> "subprocess.Popen[str]":
        paths = {name: str(runs / "cache") for name in ("DATADIR", "MODEL", "LOGDIR")}
        command = [sys.executable, "-m", "bench.launch", "engine=huggingface", "recipe.log_every_steps=1"]
        return spawn([*command, "task=pretrain_tiny", "task.training.max_steps=100000", *overrides], paths)

    return start


def rank_1(launcher: int) -> int:
    workers = (p for p in psutil.Process(launcher).children(recursive=True) if "jobs.tasks.train" in p.cmdline())
    return next(p.pid for p in workers if p.environ()["RANK"] == "1")


@pytest.mark.parametrize("ending", ENDINGS)
def test_ended_run_is_aborted_and_leaves_no_process(launch: Launch, tmp_path: Path, ending: str) -> None:
    signum, whom, exit_code, outcome, rule = ENDINGS[ending]
    run = tmp_path / "run"
    process = launch(f"launch.folder={run}", FSDP2)
    while not (run / "result_0.txt").exists() or "train_loss" not in (run / "result_0.txt").read_text():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    pids = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid if whom == "launcher" else rank_1(process.pid), signum)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == exit_code and "Traceback" not in output, output
    assert explain([run]).rule == rule
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    last = reader.read(run / "result_0.txt")[0][-2]
    assert (last.key, last.metadata["status"]) == (mllog.RUN_STOP, "aborted")
    assert json.loads((run / "status.json").read_text())["outcome"] == outcome


WRONG = {
    "no JSON": ("{", "is not JSON", "write a single JSON object into the file"),
    "another clip": ('{"gradient_clipping": 7}', "sets gradient_clipping to 7", "in the file, or change the config"),
    "an optimizer": (
        '{"optimizer": {"type": "Lion"}}',
        "has the block 'optimizer'",
        "remove 'optimizer' from the file",
    ),
    "what DeepSpeed refuses": ('{"zero_optimization": {"stage": 0, "nonsense": 1}}', "nonsense", "correct this file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_deepspeed_json_is_refused_with_what_and_fix(launch: Launch, tmp_path: Path, case: str) -> None:
    text, what, fix = WRONG[case]
    (tmp_path / "mine.json").write_text(text)
    own = f"{BLOCK}.deepspeed_json={tmp_path}/mine.json"
    process = launch(f"launch.folder={tmp_path}/run", f"{BLOCK}.strategy=deepspeed", own)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 2 and "Traceback" not in output, output
    assert what in output and fix in output
