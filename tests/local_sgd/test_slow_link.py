"""Local SGD and synchronous training in two network namespaces, over a link that tc limits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytestmark = [pytest.mark.trains, pytest.mark.slow]


def why_not() -> str:
    """Return why this machine cannot limit a link; empty where it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    return f"needs {' and '.join(missing)}: install iproute2" if missing else ""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_local_sgd_is_several_times_as_fast_as_synchronous_training_over_10_mbit(tmp_path: Path) -> None:
    """Sending gradients takes many times a step, so that other load of the machine hardly matters. The plan only models
    the link; measured runs waited longer, see docs/results/2026-11-23-slow-network.md."""
    words = ["--mbit", "10", "--delay-ms", "0", "--steps", "20", "--only", "synchronous", "H10"]
    command = [sys.executable, "experiments/slow_network.py", *words, "--folder", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line for line in done.stdout.splitlines() if " H10 " in line)
    measured, predicted = (float(cell.rstrip("%")) for cell in row.split() if cell.endswith("%"))
    assert predicted / 2 < measured < 1.05 * predicted
    assert float(row.split()[-2]) > 2, row
