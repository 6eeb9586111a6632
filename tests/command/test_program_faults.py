"""Programs that fail in their own ways, launched as a user does: each is judged, ended and explained."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.diagnosis import explain
from bench.results import kind
from helpers.paths import ROOT

pytestmark = pytest.mark.starts
STEPS = 20
HEAD = """
import os, signal, sys, time
def steps(first, last):
    for step in range(first, last + 1):
        time.sleep(0.02)
        print(f"step {step} loss {3 / step:.4f}", flush=True)
steps(1, 10)
"""
FAULTS = {
    "hangs": ("time.sleep(600)", "RUN-17", "no progress for "),
    "hangs with a heartbeat": (
        "while True: print('still here', flush=True); time.sleep(0.05)",
        "RUN-17",
        "none of them is a step",
    ),
    "crashes": ("raise RuntimeError('the optimizer is wrong')", "RUN-20", "the optimizer is wrong"),
    "has no memory": ("raise RuntimeError('CUDA out of memory. Tried to allocate')", "RUN-01", "CUDA out of memory"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "RUN-20", "signal 9 (Killed)"),
    "prints NaN": ("print('step 11 loss nan', flush=True); time.sleep(600)", "RUN-05", "loss is nan at step 11"),
    "prints half a line": ("steps(11, 19); print('step 20 lo', end='')", "RUN-23", "ended after step 19"),
    "prints nothing readable": (None, "RUN-21", "has found no training step"),
    "forks and leaves": (
        "os.fork() or (os.setsid(), time.sleep(600))\nsteps(11, 20)",
        "RUN-22",
        "some of its processes still run: ",
    ),
    "floods": (
        "[os.write(1, b'x' * 4000 + b'\\n') for _ in range(10000)]; os.write(1, b'y' * (3 << 20) + b'\\n')\n"
        "os.write(1, bytes(range(256)))\nprint()\nsteps(11, 20)",
        None,
        "",
    ),
}
PATTERNS = r"engine.command.patterns=['step (?P<step>\d+) loss (?P<loss>\S+)']"


def launched(tmp: Path, program: str, *overrides: str) -> "subprocess.CompletedProcess[str]":
    (tmp / "train.py").write_text(program)
    paths = {name: str(tmp) for name in ("DATADIR", "MODEL", "LOGDIR")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    words = (
        *("task=my_program", "cluster.ranks_per_node=1", f"task.training.max_steps={STEPS}"),
        *("engine.command.argv=[python,train.py]", "launch.stall.floor_s=1", f"launch.folder={tmp}/run"),
    )
    return subprocess.run(
        [sys.executable, "-m", "bench", "launch", *words, *overrides],
        cwd=tmp,
        env=os.environ | paths | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_a_program_that_fails_is_judged_and_explained(fault: str, tmp_path: Path) -> None:
    body, rule, words = FAULTS[fault]
    program = "print('hello')" if body is None else HEAD + body
    done = launched(tmp_path, program, "engine.command.adapter=plain", PATTERNS)
    run = tmp_path / "run"
    [entry] = json.loads((run / "ledger.json").read_text())
    explained = explain([run])
    assert (done.returncode == 0, entry["outcome"] == "valid") == (rule is None, rule is None), done.stdout
    assert explained.rule == rule, done.stdout + done.stderr
    assert words in (explained.evidence or ""), explained.evidence
    assert kind.read(run / "result_0.txt").result.valid is (rule is None)
    kept = sum(path.stat().st_size for path in (run / "rank_logs").glob("*.out"))
    assert kept < 17 << 20, "a flood is bounded"
    here = str(tmp_path / "train.py")
    left = [process.pid for process in psutil.process_iter(["cmdline"]) if here in (process.info["cmdline"] or [])]
    assert not left, "nothing of the program outlives its trial"
