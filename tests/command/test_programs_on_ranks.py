"""engine=command with per=rank: two ranks of one program, of which rank 0 is read."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.diagnosis import explain
from bench.mlperf import reader
from bench.runs import status as statuses
from helpers import programs

pytestmark = pytest.mark.starts
Spawn = Callable[..., "subprocess.Popen[str]"]


def launched(tmp: Path, spawn: Spawn, *words: str) -> str:
    paths = {name: str(tmp) for name in ("DATADIR", "MODEL", "LOGDIR")}
    overrides = ("cluster.device=cpu", "cluster.gpu=null", "cluster.ranks_per_node=2", f"launch.folder={tmp}/run")
    process = spawn([sys.executable, "-m", "bench", "launch", *overrides, *words], paths)
    return process.communicate(timeout=240)[0]


def test_both_ranks_find_each_other_and_rank_0_is_read(tmp_path: Path, spawn: Spawn) -> None:
    output = launched(tmp_path, spawn, *programs.words(tmp_path))
    run = tmp_path / "run"
    status = statuses.read(run)
    assert status is not None and status.outcome == "valid", output
    for rank in (0, 1):
        first = (run / f"rank_logs/trial_0_rank_{rank}.out").read_text().splitlines()[0]
        assert first == f"rank {rank} of 2, local rank {rank}, node 0"
    losses = [event.value for event in reader.read(run / "result_0.txt")[0] if event.key == "train_loss"]
    assert losses == [round(3 / step, 4) for step in range(1, programs.STEPS + 1)], "those of rank 0, each once"


def test_the_rank_that_fails_ends_the_run_and_explains_it(tmp_path: Path, spawn: Spawn) -> None:
    """The program of rank 0 then fails as well. A child of rank 1's program keeps its output open."""
    output = launched(tmp_path, spawn, *programs.words(tmp_path, failing=1))
    status, explained = statuses.read(tmp_path / "run"), explain([tmp_path / "run"])
    assert status is not None and (status.outcome, status.exit_code) == ("failed", 1), output
    assert explained.rule in ("RUN-20", "RUN-13"), "RUN-13 if the runner of rank 1 was ended before it could report"
    assert "ValueError: rank 1 has no rows" in str(explained.evidence), explained
    assert status.rule == explained.rule
