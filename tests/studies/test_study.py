"""`runstop study tiny` as a user runs it: killed, interrupted, started twice, and continued up to its table."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import answers
from helpers.paths import ROOT

Spawn = Callable[..., "subprocess.Popen[str]"]
ARGV = [sys.executable, "-m", "bench", "study", "tiny", "cluster=local", "data.eval_rows=16", "--runs", "2"]
RUNS = [f"{arm}.{block}" for arm in ("bf16", "fp32") for block in (1, 2)]


def typed(tmp_path: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"LOGDIR": str(tmp_path)}
    return subprocess.run([*ARGV, *words], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


def until(is_so: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    """Wait for a condition while a process runs."""
    deadline = time.monotonic() + 600
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)


def attempts(folder: Path) -> dict[str, list[str]]:
    """Return the outcome of each attempt at each run."""
    outcomes_by_run = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/ledger.json")}
    return {
        name: [one["outcome"] for one in entries[0].get("attempts", [])] for name, entries in outcomes_by_run.items()
    }


def valid_runs(folder: Path) -> set[str]:
    return {name for name, outcomes in attempts(folder).items() if outcomes[-1:] == ["valid"]}


@pytest.mark.trains
def test_a_study_that_is_killed_twice_gives_a_table_with_all_runs(tmp_path: Path, spawn: Spawn) -> None:
    """SIGKILL to the whole process group in the second run, Ctrl-C in the third; valid runs are left alone."""
    folder = tmp_path / "studies/tiny-local"
    killed = spawn(ARGV, {"LOGDIR": str(tmp_path)})
    until(lambda: len(valid_runs(folder)) == 1 and len(list(folder.glob("*/result_0.txt"))) == 2, killed)
    os.killpg(killed.pid, signal.SIGSTOP)  # so that the second run does not end meanwhile
    second = typed(tmp_path)
    assert second.returncode == 2 and "another process is already working on this study" in second.stderr
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    completed = completed_trials(folder)
    interrupted = spawn(ARGV, {"LOGDIR": str(tmp_path)})
    until(lambda: len(valid_runs(folder)) == 2 and len(list(folder.glob("*/result_0.txt"))) == 3, interrupted)
    before = logs(folder)
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(120) == 130
    completed |= completed_trials(folder)
    assert "2 of 4 runs are valid" in typed(tmp_path, "--table").stdout
    done = typed(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    require_whole(answers.one(done.stdout))
    outcomes_by_run = attempts(folder)
    assert sorted(outcomes_by_run) == RUNS and all(
        outcomes.count("valid") == 1 for outcomes in outcomes_by_run.values()
    )
    num_attempts = sum(len(outcomes) for outcomes in outcomes_by_run.values())
    assert num_attempts == 6 - len(completed), "two attempts were cut short, unless their trials had ended by then"
    assert {name: text for name, text in logs(folder).items() if name in before} == before


def completed_trials(folder: Path) -> set[str]:
    """Return the runs that are not valid yet although their trial has ended: the next call judges it."""
    written = {path.parent.name: path.read_text() for path in folder.glob("*/result_0.txt")}
    return {name for name, log in written.items() if name not in valid_runs(folder) and '"status": "success"' in log}


def logs(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name / "result_0.txt").read_bytes() for name in valid_runs(folder)}


def require_whole(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert all(len(cell["values"]) == 2 and not cell["reason"] for cell in row["cells"].values())
        assert sorted(row["cells"]["step_time"]["runs"]) == [f"{row['arm']}.{block}" for block in (1, 2)]
    (difference,) = result["differences"]
    assert difference["comparison"]["verdict"] in ("different", "undecided", "equivalent", "equivalent, different")
    assert result["notes"] == ["step times and rates are from 20 steps, after 5 skipped steps"]
