"""A run that is killed at any event is resumed to a verified result, or says why not: at 30 events, and at all."""

import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT

KILLS = [sys.executable, str(ROOT / "tests/launch/kills.py")]


def done(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([*KILLS, *words], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.starts
def test_killed_runs_are_resumed() -> None:
    """Of all scenes: launches here and on hosts, a resume, a submission, the steps of a job."""
    sample = done("--draw", "30", "--seed", "41")
    assert sample.returncode == 0, sample.stdout + sample.stderr


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_runs_killed_at_any_event_are_resumed() -> None:
    every = done()
    assert every.returncode == 0, every.stdout + every.stderr
