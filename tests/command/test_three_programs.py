"""The shipped study of the same fine-tuning by runstop, by TRL and by a plain PyTorch script, on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import three_programs
from helpers.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.trains]


@three_programs.needs_trl
def test_the_programs_learn_the_same_and_their_speed_has_a_verdict(tmp_path: Path) -> None:
    environment = os.environ | {name: str(tmp_path / name.lower()) for name in ("DATADIR", "MODEL", "LOGDIR")}
    argv = [sys.executable, "-m", "bench", *three_programs.STUDY, "cluster=local"]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    three_programs.check(json.loads(done.stdout))
