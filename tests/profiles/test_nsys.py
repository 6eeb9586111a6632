"""Nsight Systems around a rank: the command, the chosen steps, and what is refused. nsys itself is a stub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import preflight
from bench.contract import plan_kinds
from bench.errors import ConfigError, SubmitError
from bench.planning import compose
from helpers.paths import ROOT
from jobs.profiles import nsys

WORDS = ("task=lora_tiny", "cluster=local", "launch.profile=nsys")
STEPS = "launch.profile_steps=[10,12]"
STUB = """\
#!/bin/sh
printf '%s\\n' "$@" >nsys_arguments
while case $1 in profile|-*) ;; *) false ;; esac; do shift; done
exec "$@"
"""


def plan_file(folder: Path, *words: str) -> Path:
    path = folder / "plan.json"
    path.write_text(plan_kinds.dumps(compose.compose([*WORDS, *words])))
    return path


@pytest.mark.long
def test_the_rank_is_started_again_under_nsys(tmp_path: Path) -> None:
    """By the same interpreter and arguments, with the report of its rank; and only once."""
    (tmp_path / "nsys").write_text(STUB)
    (tmp_path / "nsys").chmod(0o755)
    plan = plan_file(tmp_path, STEPS)
    code = "import sys; from jobs.profiles import nsys; nsys.restart(sys.argv[1:]); print('inside', sys.argv[1:])"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    env |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    argv = [sys.executable, "-c", code, str(plan), "--trial", "0"]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"inside {[str(plan), '--trial', '0']}\n"
    words = (tmp_path / "nsys_arguments").read_text().splitlines()
    assert words[:3] == ["profile", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    assert f"--output={tmp_path}/rank_logs/trial_0.rank_1" in words and words[-3:] == argv[3:]
    without = json.loads(plan.read_text())
    without["config"]["launch"] |= {"profile": "none"}
    plan.write_text(json.dumps(without))
    (tmp_path / "nsys_arguments").unlink()
    subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not (tmp_path / "nsys_arguments").exists()


def test_the_chosen_steps_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setenv(nsys.INSIDE, "1")
    capture = nsys.capture(compose.compose([*WORDS, STEPS]))
    for step in range(1, 20):
        capture.before(step)
        calls.append(str(step))
        capture.after(step)
    assert calls[8:17] == ["9", "wait", "start", "10", "11", "12", "wait", "stop", "13"]
    assert nsys.capture(compose.compose(list(WORDS[:2]))).steps is None


def test_a_missing_nsys_is_found_before_and_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv(nsys.INSIDE, raising=False)
    plan = compose.compose([*WORDS, STEPS])
    assert "nsys is not on PATH" in [finding.what for finding in preflight.inspect(plan)]
    nsys.restart([str(plan_file(tmp_path, STEPS)), "--trial", "0"], {"RANK": "0"})  # the program says so later
    with pytest.raises(SubmitError, match="nsys is not on PATH"):
        nsys.capture(plan)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (WORDS, "launch.profile is nsys, but launch.profile_steps, the steps to record, is not set"),
        ((*WORDS, "launch.profile_steps=[3]"), r"is \[3\], but must be the first and the last step to record, "),
        ((*WORDS, "launch.profile_steps=[0,2]"), "from 1 to "),
        ((*WORDS, "launch.profile_steps=[9,8]"), "from 1 to "),
        ((*WORDS, "launch.profile_steps=[1,999999]"), "from 1 to "),
        ((*WORDS[:2], STEPS), "profile_steps needs launch.profile=nsys, but launch.profile is none"),
        (("task=lora70b", "cluster=dgx1", "launch.profile=nsys", STEPS), "task.submittable is true"),
        (("task=serve_tiny", "cluster=local", "launch.profile=nsys"), "launch.profile=nsys needs training steps"),
        (("task=kernels_tiny", "cluster=local", "launch.profile=nsys"), "launch.profile=nsys needs training steps"),
    ],
)
def test_what_nsys_cannot_record_is_refused(words: tuple[str, ...], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        compose.compose(list(words))
