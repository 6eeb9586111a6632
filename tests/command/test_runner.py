"""A program with its own MLPerf records, one that reports its own times, and one that is stopped and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_program_faults import PATTERNS, launched

from bench.contract import mllog
from bench.mlperf import reader
from bench.results import kind
from helpers.paths import ROOT

pytestmark = pytest.mark.starts
MLLOG = """
import json, sys, time
def log(kind, key, value=None, late=0, **metadata):
    time_ms = int(1000 * time.time()) + late
    record = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}
    print(":::MLLOG " + json.dumps(record), flush=True)
log("INTERVAL_START", "init_start")
log("POINT_IN_TIME", "seed", int(sys.argv[1]))
log("POINT_IN_TIME", "opt_base_learning_rate", 0.5)
log("INTERVAL_END", "init_stop")
log("INTERVAL_START", "run_start")
log("INTERVAL_START", "block_start", samples_count=0)
for step in range(1, 21):
    time.sleep(0.02)
    log("POINT_IN_TIME", "train_loss", 1 / step, samples_count=step)
BROKEN
log("INTERVAL_END", "block_stop", samples_count=20)
log("POINT_IN_TIME", "eval_accuracy", 0.5, samples_count=20)
log("INTERVAL_END", "run_stop", late=LATE, status="success")
"""


def text(name: str) -> str:
    """Return a JSON text for an override's quoted words."""
    return f"engine.command.argv=[python,train.py,'{{{name}}}']"


@pytest.mark.parametrize(("broken", "late", "rule"), [("", 0, None), ("print(':::MLLOG {\"key\": ')", 0, "LOG-09")])
def test_records_of_a_program_are_taken_over(broken: str, late: int, rule: str | None, tmp_path: Path) -> None:
    program = MLLOG.replace("BROKEN", broken).replace("LATE", str(late))
    done = launched(tmp_path, program, text("seed"))
    run = tmp_path / "run"
    judged = kind.read(run / "result_0.txt")
    errors = [finding.rule for finding in judged.result.findings if finding.severity == "error"]
    assert errors == ([] if rule is None else [rule]), done.stdout
    assert done.returncode == (0 if rule is None else 1), done.stdout + done.stderr
    events = reader.read(run / "result_0.txt")[0]
    keys = [event.key for event in events]
    once = ("init_start", "init_stop", "run_start", "run_stop", "seed", "global_batch_size", "opt_base_learning_rate")
    assert [keys.count(key) for key in once] == [1] * len(once), "what the program logs, the runner does not"
    own = [event for event in events if event.key in ("train_loss", "eval_accuracy", "run_stop")]
    assert all(event.metadata[mllog.BY_PROGRAM] is True for event in own)
    assert all(abs(event.time_ms - event.metadata[mllog.PROGRAM_TIME_MS]) < 1000 for event in own)
    assert judged.result.hyperparameters["opt_base_learning_rate"] == 0.5
    assert [finding.rule for finding in judged.result.findings if finding.severity == "warning"] == ["LOG-24"]


def test_times_of_a_program_that_contradict_the_runners_clock_are_found(tmp_path: Path) -> None:
    launched(tmp_path, MLLOG.replace("BROKEN", "").replace("LATE", "-90000"), text("seed"))
    findings = kind.read(tmp_path / "run/result_0.txt").result.findings
    assert [f.rule for f in findings if f.severity == "error"] == ["LOG-25"]
    boasting = """
import time
for step in range(1, 21):
    time.sleep(0.05)
    print(f"step {step} loss 1 time 0.001", flush=True)
"""
    second = tmp_path / "second"
    second.mkdir()
    pattern = PATTERNS.replace(r"(?P<loss>\S+)", r"(?P<loss>\S+) time (?P<step_time_s>\S+)")
    done = launched(second, boasting, "engine.command.adapter=plain", pattern)
    result = kind.read(second / "run/result_0.txt").result
    assert [f.rule for f in result.findings] == ["LOG-06", "LOG-24", "LOG-25"]
    assert result.step_time_ms is not None and result.step_time_ms.median > 49, "the runner's clock counts"
    clock = re.search(r"LOG-25: a step takes 0\.001 s according to the program, but (0\.\d+)", done.stdout)
    assert clock is not None and float(clock[1]) >= 0.05, "it sleeps so long; a busy machine takes longer"


RESUMING = """
import pathlib, signal, sys, time
saved = pathlib.Path(sys.argv[1], "step")
done = int(saved.read_text()) if saved.exists() else 0
def stop(*_):
    saved.write_text(str(step))
    print("saved", step, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
for step in range(done + 1, 21):
    time.sleep(0.01 if done else 0.2 if step < 8 else 10)  # it must not end before it is stopped
    print(f"step {step} loss 1", flush=True)
"""


def test_a_stopped_program_gets_the_signal_and_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RESUMING)
    paths = {name: str(tmp_path) for name in ("DATADIR", "MODEL", "LOGDIR")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = os.environ | paths | {"PYTHONPATH": path}
    words = (
        *("task=my_program", "cluster.ranks_per_node=1", "task.training.max_steps=20", "engine.command.adapter=plain"),
        *(text("checkpoints"), PATTERNS, "engine.command.resumes=true", f"launch.folder={tmp_path}/run"),
        "recipe.log_every_steps=1",
    )
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-m", "bench", "launch", *words], cwd=tmp_path, env=env) as first:
        until = time.monotonic() + 60
        while '"step": 4' not in _read(run / "result_0.txt") and time.monotonic() < until:
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
    assert "saved" in "".join(path.read_text() for path in (run / "rank_logs").glob("*.out"))
    done = subprocess.run(
        [sys.executable, "-m", "bench", "resume", str(run)], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [entry] = json.loads((run / "ledger.json").read_text())
    assert [attempt["outcome"] for attempt in entry["attempts"]] == ["aborted", "valid"]
    result = kind.read(run / "result_0.txt").result
    assert (result.resumed_samples or 0) >= 5 and result.minutes is None, "its log covers only a part"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
