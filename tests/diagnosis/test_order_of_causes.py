"""A rank that failed by itself explains the run, wherever its lines are among those of ranks that lost it."""

import random
import sys
from pathlib import Path

import pytest

from bench import diagnosis
from helpers.paths import ROOT

ECHO = "[rank3]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:4001\n"
TIMEOUT = "[rank3]:[E1120 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL()\n"
TRACE = '5: Traceback (most recent call last):\n5:   File "/work/train.py", line 9, in step\n'
CANCELLED = "slurmstepd: error: *** JOB 9 ON dgx-1 CANCELLED AT 2026-11-20T11:00:00 DUE TO TIME LIMIT ***\n"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (ECHO + "5: Fatal Python error: Segmentation fault\n", "RUN-04"),
        (TIMEOUT + "    traceback : Signal 9 (SIGKILL) received by PID 3170\n", "RUN-02"),
        (TIMEOUT + TRACE + "5: KeyError: 'input_ids'\n", "RUN-13"),
        (TIMEOUT + TRACE + "5: RuntimeError: the connection to rank 3 was lost\n", "NCC-06"),
        (TIMEOUT + "5: Exception ignored in: <function P.__del__>\n" + TRACE + "5: KeyError: 'x'\n", "NCC-06"),
        (CANCELLED + "5: Fatal Python error: Segmentation fault\n", "SLU-07"),
        (CANCELLED + TRACE + "5: KeyError: 'input_ids'\n", "SLU-07"),
        (TIMEOUT + "Warning  NodeNotReady  4m  node-controller  Node is not ready\n", "KUB-13"),
    ],
)
def test_own_failures_win_over_lost_connections_and_ends_over_both(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "job.out").write_text("starting 8 ranks\n" + text)
    assert diagnosis.explain([tmp_path / "job.out"]).rule == rule


@pytest.mark.long
def test_composed_logs_are_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred logs, as `make grade-why` composes them."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "experiments"), *sys.path])
    import grade_why

    draw = random.Random(11)
    is_good = grade_why.graded([grade_why.composed(draw) for _ in range(100)], misses=False)
    assert is_good, capsys.readouterr().out
