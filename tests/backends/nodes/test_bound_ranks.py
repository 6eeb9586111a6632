"""Ranks end with their launcher, and write only the log of the attempt that they were started for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.backends.nodes import processes
from bench.contract import mllog, run_files
from bench.contract.mllog import Binding
from bench.errors import ConfigError
from bench.planning import compose
from helpers.paths import ROOT
from jobs.ranks import program

LAUNCHER = """
import os, sys, time
from pathlib import Path
from bench.backends.nodes import processes

words = [sys.executable, "-S", "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
processes.start(words, Path(), dict(os.environ), Path("rank.out"))
time.sleep(600)
"""


@pytest.mark.starts
def test_a_rank_that_still_imports_its_packages_ends_with_its_killed_launcher(tmp_path: Path) -> None:
    output = tmp_path / "rank.out"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], cwd=tmp_path, env=environment) as launcher:
        while not (output.exists() and output.read_text().endswith("\n")):
            assert launcher.poll() is None
            time.sleep(0.01)
        rank = psutil.Process(int(output.read_text()))
        assert rank.ppid() == launcher.pid
        launcher.kill()
    rank.wait(timeout=30)


@pytest.mark.starts
def test_a_rank_whose_launcher_ended_before_its_start_does_not_start(tmp_path: Path) -> None:
    """Process 1 is in the place of a launcher that has ended: the rank is not its child."""
    bound = [sys.executable, "-I", "-S", str(processes.BOUND)]
    done = subprocess.run([*bound, "1", "touch", "started"], cwd=tmp_path)
    assert done.returncode == 128 + signal.SIGTERM and not (tmp_path / "started").exists()
    words = [*bound, str(os.getpid()), "no-such-program"]
    missing = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert missing.returncode == 127
    assert missing.stderr == "no-such-program cannot be started: No such file or directory\n"


def test_a_rank_of_an_earlier_attempt_writes_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the later attempt begins before the rank looks, between its two looks, or moves the files away."""
    trial = compose.compose(["task=lora_tiny", "cluster=local"]).trials[0]
    log, file = tmp_path / trial.log, tmp_path / run_files.binding(0)
    first, second = (Binding(nonce=letter * 32, trial=0, attempt=n) for n, letter in enumerate("ab", 1))
    monkeypatch.setenv(run_files.ATTEMPT_VARIABLE, first.nonce)
    mllog.save(tmp_path, first)
    program._opened(tmp_path, trial).close()
    assert first.nonce in log.read_text()
    log.unlink()
    mllog.save(tmp_path, second)
    with pytest.raises(ConfigError, match="^CFG-05: this rank belongs to an earlier attempt of trial 0"):
        program._opened(tmp_path, trial)
    file.unlink()
    with pytest.raises(ConfigError, match="a later attempt has already begun"):
        program._opened(tmp_path, trial)
    assert not log.exists()

    class Slow(mllog.Writer):
        def __init__(self, path: Path, binding: Binding | None) -> None:
            mllog.save(tmp_path, second)
            super().__init__(path, binding)

    mllog.save(tmp_path, first)
    monkeypatch.setattr(mllog, "Writer", Slow)
    with pytest.raises(ConfigError, match="a later attempt has already begun"):
        program._opened(tmp_path, trial)
    assert not log.exists(), "the later attempt can open it"
    monkeypatch.setenv(run_files.ATTEMPT_VARIABLE, second.nonce)
    program._opened(tmp_path, trial).close()
    assert second.nonce in log.read_text()
