"""What the study three_programs must show, wherever it ran."""

import importlib.util
from typing import Any

import pytest

STUDY = ("study", "three_programs", "--runs", "2", "--json")
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="the arm TRL needs `pip install trl`")


def check(result: dict[str, Any]) -> None:
    """Require two runs of every program, the same loss in those with the same weights, and verdicts on all pairs."""
    cells = {row["labels"]["program"]: list(row["cells"].values()) for row in result["rows"]}
    assert sorted(cells) == ["TRL", "plain PyTorch", "runstop", "runstop with transformers"]
    assert [len(cell["values"]) for own in cells.values() for cell in own] == [2] * 12, result["rows"]
    losses = {program: own[0]["values"] for program, own in cells.items()}
    for program in ("TRL", "plain PyTorch"):
        assert losses[program] == pytest.approx(losses["runstop with transformers"], rel=1e-3)
    assert losses["runstop"] == pytest.approx(losses["runstop with transformers"], rel=0.25), "other weights"
    verdicts = [one["comparison"]["verdict"] for one in result["differences"]]
    assert len(verdicts) == 6 and "not compared" not in verdicts
    assert [one["verdict"] for one in result["statements"]][:1] == ["holds"]
