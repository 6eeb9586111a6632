"""Groups in two network namespaces, joined by a link that tc limits: what the plan predicts is what is measured."""

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
def test_the_efficiency_over_a_link_of_10_mbit_is_that_of_the_plan(tmp_path: Path) -> None:
    """Gradients take many times a step there, so that how busy the machine is hardly counts."""
    words = ["--mbit", "10", "--delay-ms", "0", "--steps", "20", "--only", "H10", "--folder", str(tmp_path / "runs")]
    command = [sys.executable, "experiments/slow_network.py", *words]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "."}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (line for line in done.stdout.splitlines() if " H10 " in line)
    measured, predicted = (float(word.rstrip("%")) for word in row.split() if word.endswith("%"))
    assert measured == pytest.approx(predicted, rel=0.05)
