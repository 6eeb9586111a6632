"""A supervised command ends cleanly with the supervisor and with the process at its standard input."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.starts
COMMAND = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path(sys.argv[1], "ended").touch()
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1], "begun").touch()
time.sleep(100)
"""
"""Like a runner: it handles SIGTERM, writes its final status, and has its own exit code."""


def kept(folder: Path) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", "bench.backends.ray.supervisor", sys.executable, "-c", COMMAND, str(folder)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, cwd=ROOT)
    wait(folder / "begun")
    return process


def wait(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.02)


def hang_up(process: "subprocess.Popen[bytes]") -> None:
    """As the death of the actor does."""
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.parametrize(
    ("harm", "code"),
    [(hang_up, 3), (subprocess.Popen.terminate, 3), (subprocess.Popen.kill, -signal.SIGKILL)],
    ids=["actor gone", "terminated", "supervisor killed"],
)
def test_the_command_writes_its_final_status(
    tmp_path: Path, harm: Callable[["subprocess.Popen[bytes]"], None], code: int
) -> None:
    with kept(tmp_path) as process:
        harm(process)
        wait(tmp_path / "ended")
        assert process.wait(30) == code
