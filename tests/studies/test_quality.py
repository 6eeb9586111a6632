"""`runstop study quality_tiny` on two CPU ranks: losses of LoRA, QLoRA and full training at equal tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from bench import studies
from bench.report.cells import cell_text
from bench.results.study import Cell, Mark
from helpers import answers
from helpers.paths import ROOT

ARGV = [sys.executable, "-m", "bench", "study", "quality_tiny", "cluster=local", "--json"]


def records(log: Path, key: str) -> list[Any]:
    lines = [json.loads(line.partition("MLLOG ")[2]) for line in log.read_text().splitlines() if ":::MLLOG" in line]
    return [line for line in lines if line["key"] == key]


@pytest.mark.slow
@pytest.mark.trains
@pytest.mark.timeout(1800)
def test_losses_at_equal_tokens_have_an_interval_over_seeds(tmp_path: Path) -> None:
    environment = os.environ | {name: str(tmp_path / "cache") for name in ("DATADIR", "MODEL")}
    environment |= {"LOGDIR": str(tmp_path)}
    done = subprocess.run(ARGV, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "studies/quality_tiny-local"
    samples, seeds = set(), {}
    for row in answers.one(done.stdout)["rows"]:
        logs = [folder / run / "result_0.txt" for run in row["cells"]["evaluation_loss"]["runs"]]
        losses = [records(log, "eval_accuracy")[-1]["value"] for log in logs]
        samples |= {records(log, "run_stop")[0]["metadata"]["samples_count"] for log in logs}
        seeds[row["arm"]] = [records(log, "seed")[0]["value"] for log in logs]
        cell = row["cells"]["evaluation_loss"]
        expected = stats.t.interval(0.95, 2, loc=np.mean(losses), scale=stats.sem(losses))
        assert cell["values"] == losses and (cell["low"], cell["high"]) == pytest.approx(expected)
        first = records(logs[0], "eval_accuracy")[0]["value"]
        assert losses[0] < first, "it learns"
        assert all(row["cells"][name]["value"] > 0 for name in ("throughput", "estimated_memory"))
    assert samples == {192 * 8} and len({tuple(of_arm) for of_arm in seeds.values()}) == 1
    result = studies.read(folder)
    assert [one.n for stated in result.statements for one in stated.intervals] == [3, 3, 3]
    assert {one.verdict for one in result.statements} <= {"holds", "does not hold", "undecided"}


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Cell(mark=Mark.measured, value=0.9253, deviation=0.002, values=(0.92,), low=0.9203, high=0.9303),
         "0.9253 (0.9203 to 0.9303)"),
        (Cell(mark=Mark.measured, value=0.9253, values=(0.9253,)), "0.925"),
        (Cell(mark=Mark.measured, value=1.5, text="1.50 (1.4–1.6)", low=1.4, high=1.6), "1.50 (1.4–1.6)"),
    ],
)  # fmt: skip
def test_a_cell_of_a_column_with_intervals_shows_the_interval_of_its_mean(cell: Cell, text: str) -> None:
    assert cell_text(cell) == text
