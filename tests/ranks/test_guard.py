"""How a rank ends early."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from helpers.paths import ROOT

RANK = """
import subprocess
from pathlib import Path
from jobs.ranks.guard import guarded

with guarded(Path("rank.error")):
    own = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(own.pid, flush=True)
    raise ValueError("broken")
"""


def test_a_rank_that_fails_leaves_no_process_behind(tmp_path: Path) -> None:
    """What it has started, as torch starts compilers, would keep the run folder's file system busy."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RANK], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: broken" in done.stderr
    assert not psutil.pid_exists(int(done.stdout))
