"""Runs are listed newest first with their overrides, and a sweep's runs in one table."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.cli import main
from bench.console import runs as run_sheets
from bench.contract import plan_kinds
from bench.planning import compose
from bench.runs import ledger
from bench.runs.command_line import with_overrides
from bench.runs.summary import Summary, summary
from helpers.clock import turned
from helpers.planted_runs import plant

MakeLog = Callable[..., Path]


def one(name: str, overrides: str, tokens_s: float | None) -> Summary:
    return Summary(
        folder=Path(name),
        started="2026-11-22 07:53",
        overrides=overrides,
        num_valid=0 if tokens_s is None else 1,
        minutes=None,
        step_time_ms=None if tokens_s is None else 100.0,
        tokens_s=tokens_s,
    )


def test_sweep_table_has_differing_overrides_and_ratios() -> None:
    common = "task=lora_tiny cluster=local"
    sweep = [
        one("a", f"{common} parallel.tp=1", 4000.0),
        one("b", f"{common} parallel.tp=2", 6000.0),
        one("c", f"{common} parallel.tp=4", None),
    ]
    sheet = run_sheets.sweep_sheet(sweep)
    assert sheet.columns == (
        *("run", "overrides", "valid trials", "step time (ms)", "minutes", "tokens/s", "tokens/s vs. first run"),
    )
    assert sheet.rows == [
        ("a", "parallel.tp=1", "1", "100.0", "", "4,000", "1.000"),
        ("b", "parallel.tp=2", "1", "100.0", "", "6,000", "1.500"),
        ("c", "parallel.tp=4", "0", "", "", "", ""),
    ]


def test_summary_of_a_run_folder(written_log: MakeLog, tmp_path: Path) -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local"])
    folder = tmp_path / "runs" / "20261122-tiny"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    (folder / "config.yaml").write_text(with_overrides("trials: 1\n", ["task=lora_tiny", "seed_base=7"]))
    os.utime(folder / "plan.json", (1e9, 1e9))
    written_log().rename(folder / "result_0.txt")
    result = summary(folder)
    assert (result.overrides, result.num_valid) == ("task=lora_tiny seed_base=7", 1)
    assert result.tokens_s and result.step_time_ms
    assert result.tokens_s == pytest.approx(8 / (result.step_time_ms / 1000) * plan.config.data.seq_length, rel=0.5)
    (folder / "plan.json").unlink()
    assert (summary(folder).num_valid, summary(folder).tokens_s) == (1, None), "tokens per sample are in the plan"
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    (folder / "result_0.txt").unlink()
    assert (summary(folder).num_valid, summary(folder).tokens_s) == (0, None)
    assert summary(tmp_path).overrides == ""


@pytest.mark.parametrize("task", ["kernels_tiny", "serve_tiny", "generate_tiny"])
def test_runs_without_training_are_listed(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = compose.compose([f"task={task}", "cluster=local"])
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "plan.json").write_text(plan_kinds.dumps(plan))
    ledger.create(folder, plan)
    with pytest.raises(SystemExit, match="0"):
        main(["runs", str(tmp_path)])
    assert "measured" in capsys.readouterr().out


def test_a_run_started_when_its_history_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = turned(monkeypatch)
    folder = plant(tmp_path / "a", clock, 100.0, 90.0, plan=compose.compose(["task=lora_tiny", "cluster=local"]))
    os.utime(folder / "plan.json", (1.8e9 - 7200, 1.8e9 - 7200))
    printed = []
    for words in (["runs", str(tmp_path)], ["history", "lora_tiny", "--folder", str(tmp_path)]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        printed.append(capsys.readouterr().out.splitlines()[2].split("\t"))
    assert printed[0][1] == printed[1][0] == summary(folder).started


def test_runs_are_listed_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = compose.compose(["task=lora_tiny", "cluster=local"])
    for age, name in enumerate(("new", "middle", "old")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(plan_kinds.dumps(plan))
        (tmp_path / name / "config.yaml").write_text(with_overrides("a: 1\n", [f"seed_base={age}"]))
        ledger.create(tmp_path / name, plan)
        os.utime(tmp_path / name / "plan.json", (1e9 - age, 1e9 - age))
    with pytest.raises(SystemExit):
        main(["runs", str(tmp_path), "--limit", "2"])
    title, heading, *rows, caption = capsys.readouterr().out.splitlines()
    assert heading.split("\t") == list(run_sheets.COLUMNS), "the same columns for every list"
    overrides = run_sheets.COLUMNS.index("overrides")
    assert [(row.split("\t")[0], row.split("\t")[overrides]) for row in rows] == [
        ("new", "seed_base=0"),
        ("middle", "seed_base=1"),
    ]
    assert caption == "runs: 2, queued or running: 0; 1 older runs not listed: use --limit N"
