"""The verbs on runs of a program: two that have finished, one that has failed, and one while it runs."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from helpers import answers

pytestmark = pytest.mark.starts
Spawn = Callable[..., "subprocess.Popen[str]"]
PROGRAM = """
import sys, time
for step in range(1, 21):
    time.sleep(float(sys.argv[2]))
    print(f"step {step} loss {3 / step:.4f}", flush=True)
    if step == int(sys.argv[3]):
        sys.exit("no rows are left")
"""
PATTERNS = r"engine.command.patterns=['step (?P<step>\d+) loss (?P<loss>\S+)']"


def started(
    spawn: Spawn, home: Path, name: str, *, pause_s: float = 0.01, fails_at: int = 0
) -> "subprocess.Popen[str]":
    words = ("task=my_program", "cluster.ranks_per_node=1", "cluster.device=cpu", "cluster.gpu=null", "trials=2")
    argv = f"engine.command.argv=[python,{home}/train.py,'{{seed}}','{pause_s}','{fails_at}']"
    how = ("engine.command.adapter=plain", PATTERNS, "task.training.max_steps=20", "recipe.log_every_steps=1")
    paths = {name: str(home) for name in ("DATADIR", "MODEL", "LOGDIR")}
    folder = f"launch.folder={home}/runs/{name}"
    return spawn([sys.executable, "-m", "bench", "launch", *words, argv, *how, folder], paths)


def test_the_verbs_on_finished_failed_and_running_programs(
    tmp_path: Path, spawn: Spawn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def types(*words: object, code: int | None = 0) -> str:
        """Return what a verb prints. code: its exit code; None: any."""
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, words)])
        printed = capsys.readouterr()
        assert code in (None, ended.value.code or 0), (words, printed)
        return printed.out + printed.err

    def loads(*words: object, code: int = 0) -> Any:
        return answers.one(types(*words, "--json", code=code))

    for name in ("DATADIR", "MODEL", "LOGDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    runs = tmp_path / "runs"
    first, edited, failed, running = (runs / name for name in ("first", "edited", "failed", "running"))
    (tmp_path / "train.py").write_text(PROGRAM)
    for name, fails_at in (("first", 0), ("failed", 12), ("edited", 0)):
        if name == "edited":
            (tmp_path / "train.py").write_text(f"{PROGRAM}# edited\n")
        started(spawn, tmp_path, name, fails_at=fails_at).wait(120)

    assert loads("verify", first)["passed"] and loads("verify", failed)["passed"]
    assert loads("why", first)["rule"] is None
    cause = loads("why", failed, code=1)
    assert cause["rule"] == "RUN-20" and "its last line: no rows are left" in cause["evidence"]
    compared = types("compare", first, edited, code=None)  # by what the machine does meanwhile
    assert "program train.py" in compared and "sha256" in compared, "an edited script is named"
    types("compare", first, failed, code=2)
    history = types("history", "my_program", "--folder", runs)
    assert "program train.py sha256" in history, "what changed since the previous run"
    assert "at least one trial has no target" in types("score", first, code=1)
    assert re.search(r"median of (\d+) steps; p10", types("report", first)), "lines that arrive together have no time"
    assert "samples/s: no valid trial" in types("report", failed, code=1)
    assert "stopped: success" in types("watch", first, "--once")
    assert "stopped: aborted" in types("watch", failed, "--once")
    assert "runstop report" in types("resume", first, code=2), "nothing is left to do"

    process = started(spawn, tmp_path, "running", pause_s=1)
    until = time.monotonic() + 120
    while "train_loss" not in (log.read_text() if (log := running / "result_0.txt").exists() else ""):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    assert "training" in types("watch", running, "--once")
    assert "still running" in loads("why", running)["title"]
    assert not loads("verify", running, code=1)["passed"]
    assert "is running" in types("resume", running, code=2)
    types("cancel", running)
    process.wait(60)
    assert loads("why", running, code=1)["rule"] == "RUN-24"
    states = {Path(row["run"]).name: row["state"] for row in answers.read(types("runs", runs, "--json"))}
    assert states == {"first": "valid", "edited": "valid", "failed": "failed", "running": "interrupted"}
