"""A sweep ends with a table of its runs, also of failed ones; each run keeps its overrides."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.contract.plan import Plan
from bench.errors import SubmitError
from bench.launch import __main__ as launch
from bench.launch import run_here
from bench.runs.summary import summary

MakeLog = Callable[..., Path]


@pytest.mark.long
def test_a_sweep_ends_with_a_table_of_its_runs(
    written_log: MakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def finished(plan: Plan, folder: Path) -> int:
        if plan.config.recipe.lr == 0.003:
            raise SubmitError("a rank died", where="here", fix="none")
        written_log().rename(folder / "result_0.txt")
        return 0

    monkeypatch.setattr(run_here, "run", finished)
    monkeypatch.setenv("LOGDIR", str(tmp_path / "runs"))
    monkeypatch.setattr(sys, "argv", ["launch", "task=lora_tiny", "recipe.lr=0.001,0.002,0.003", "--multirun"])
    with pytest.raises(SystemExit) as stop:
        launch.main()
    assert stop.value.code == 1
    title, heading, *rows, _ = capsys.readouterr().out.splitlines()
    assert (title, heading.split("\t")[:3]) == ("runs of this sweep", ["run", "overrides", "valid trials"])
    cells = [row.split("\t") for row in rows]
    assert [row[1:3] for row in cells] == [[f"recipe.lr=0.00{n}", valid] for n, valid in ((1, "1"), (2, "1"), (3, "0"))]
    assert cells[0][6] == "1.000" and cells[2][3:] == [""] * 4
    folders = sorted((tmp_path / "runs").iterdir())
    assert {summary(folder).overrides for folder in folders} == {f"task=lora_tiny recipe.lr=0.00{n}" for n in (1, 2, 3)}
    assert all(folder.joinpath("config.yaml").read_text().splitlines()[2].startswith("task:") for folder in folders)
