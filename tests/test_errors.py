"""How programs end that a signal stops."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from bench.errors import exit_code_of_signals
with exit_code_of_signals():
    exec("os.kill(os.getpid(), int(sys.argv[1]))")  # as while a module that makes dataclasses is imported
"""


@pytest.mark.starts
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_gives_its_exit_code(signum: signal.Signals) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(int(signum))], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (128 + signum, "")
