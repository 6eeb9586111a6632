"""The tables of a study have the manually calculated numbers of the logs in its folder."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev

import pytest
from test_spec import written

from bench import cli, studies
from bench.console import study as study_sheets
from bench.contract import atomic_files
from bench.errors import ConfigError
from bench.results.comparison import Verdict
from bench.results.study import Cell, Mark, PlannedArm, StudyResult
from bench.studies import folder as folders
from bench.studies import library
from bench.studies.folder import StoredStudy
from helpers import answers, study_results
from helpers.study_runs import failed, valid_run

STUDY = """
title: t
question: q
source: s
axes: {model: {7B: [], 13B: []}, method: {Naive: [], Z3: []}}
cases:
  - {match: {arm: 13B Naive}, not_advisable: it swaps}
  - {match: {arm: 13B Z3}, calculated: {steps: 4, of_steps: 100}}
columns:
  - {measurement: step_time, title: step time, unit: ms, higher_is_better: false}
  - {measurement: throughput_per_gpu, title: speed, unit: tokens/s/GPU, higher_is_better: true}
  - {measurement: time_of_steps, title: time, unit: s, higher_is_better: false}
  - {measurement: epoch_time, title: epoch, unit: s, higher_is_better: false}
  - {measurement: estimated_step_time, title: estimate, unit: ms, higher_is_better: false}
  - {measurement: micro_batch_size, title: batch, higher_is_better: true}
pairs:
  - {first: 7B Naive, second: 7B Z3, measurement: step_time}
  - {first: 7B Naive, second: 13B Naive, measurement: step_time}
tables: [{title: speeds, rows: [method], columns: [model], measurement: throughput_per_gpu}]
published: [theirs]
"""
THEIRS = """
title: theirs
place: p. 1, table 1
hardware: 8 GPUs
date: "2024"
columns:
  - {measurement: throughput_per_gpu, unit: tokens/s/GPU, labels: {}}
  - {measurement: time_of_steps, unit: min, labels: {}}
rows:
  - {labels: {model: 7B, method: Naive}, printed: ["100", "3"]}
  - {labels: {model: 13B}, printed: ["50", "4"]}
"""
ARMS = ("7B Naive", "7B Z3", "13B Naive", "13B Z3")


def study_folder(tmp_path: Path, text: str = STUDY, **arms: PlannedArm) -> Path:
    """Write the folder of a study with planned arms."""
    config_dir = written(tmp_path, text)
    (tmp_path / "published").mkdir(exist_ok=True)
    (tmp_path / "published/theirs.yaml").write_text(THEIRS)
    study = library.load("mine", config_dir=config_dir)
    publications = library.publications(study, config_dir=config_dir)
    stored = StoredStudy(
        name="mine", cluster="here", overrides=("cluster=here",), study=study, publications=publications
    )
    planned = [arms.get(name, PlannedArm(name=name, micro_batch_size=8, step_time_ms=1500.0)) for name in ARMS]
    swaps = PlannedArm(name="13B Naive", mark=Mark.not_advisable, reason="it swaps", runs=False)
    planned = [swaps if arm.name == "13B Naive" else arm for arm in planned]
    folder = tmp_path / "mine-here"
    with folders.locked(folder, stored, planned):
        pass
    return folder


def cells(result: StudyResult, arm: str) -> dict[str, Cell]:
    return dict(result.row(arm).cells)


def test_cells_are_means_over_valid_runs(tmp_path: Path) -> None:
    folder = study_folder(tmp_path)
    seconds = [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0, 4.0, 4.0], [1.5, 1.5, 1.5, 1.5]]
    for block, times in enumerate(seconds, 1):
        valid_run(folder / f"7B_Naive.{block}", times, data_source="c4")
        valid_run(folder / f"7B_Z3.{block}", [2 * time for time in times])
        valid_run(folder / f"13B_Z3.{block}", times, data_source="pubmedqa")
    failed(folder / "7B_Z3.4", "RUN-02", "a rank was killed")
    result = studies.read(folder)
    steps = cells(result, "7B Naive")["step_time"]
    assert (steps.mark, steps.values, steps.n) == (Mark.measured, (1500.0, 3000.0, 1500.0), 3)
    assert steps.value == pytest.approx(2000) and steps.deviation == pytest.approx(math.sqrt(750000))
    assert steps.runs == ("7B_Naive.1", "7B_Naive.2", "7B_Naive.3")
    assert cells(result, "13B Naive") == dict.fromkeys(
        steps_of(result), Cell(mark=Mark.not_advisable, reason="it swaps")
    )
    short = cells(result, "13B Z3")
    for name in ("time_of_steps", "epoch_time"):
        assert (short[name].mark, short[name].values) == (Mark.calculated, (150.0, 300.0, 150.0))
        assert short[name].reason == "calculated from 4 of 100 steps"
    assert short["step_time"].mark is Mark.measured, "the step time does not depend on the length of a run"
    estimate = cells(result, "7B Z3")["estimated_step_time"]
    assert (estimate.mark, estimate.value) == (Mark.estimated, 1500.0)
    assert cells(result, "7B Z3")["micro_batch_size"].values == (8, 8, 8)
    assert cells(result, "7B Naive")["epoch_time"].reason.startswith(
        "the runs did not measure this; their measurements are "
    )
    assert (result.hardware, result.commit, result.command) == ("GPU", "abc", "runstop study mine cluster=here")


def test_random_rows_have_no_epoch(tmp_path: Path) -> None:
    """Nothing next to a published epoch of a data set is the time of rows that are not of it."""
    folder = study_folder(tmp_path)
    valid_run(folder / "13B_Z3.1", [1.0, 1.0, 2.0, 2.0], data_source="random")
    short = cells(studies.read(folder), "13B Z3")
    assert short["time_of_steps"].values == (150.0,)
    assert (short["epoch_time"].mark, short["epoch_time"].value) == (Mark.no_result, None)
    assert short["epoch_time"].reason.startswith("the rows are random, and only the rows of a data set have an epoch")


def steps_of(result: StudyResult) -> list[str]:
    return [column.measurement for column in result.columns]


def test_only_the_steps_of_the_window_count(tmp_path: Path) -> None:
    """The first two of five steps, which are slow, do not count; a log that lists fewer steps has no value."""
    text = STUDY.replace("  - {match: {arm: 13B Z3}, calculated: {steps: 4, of_steps: 100}}\n", "")
    folder = study_folder(tmp_path, f"{text}window: {{skip_steps: 2, steps: 3}}\nruns: 2\n")
    valid_run(folder / "7B_Naive.1", [9.0, 9.0, 1.0, 2.0, 5.0])
    valid_run(folder / "7B_Naive.2", [9.0, 9.0, 1.0, 2.0])
    of_arm = cells(studies.read(folder), "7B Naive")
    assert of_arm["step_time"].values == (2000.0,) and of_arm["time_of_steps"].values == (8.0,)
    assert of_arm["throughput_per_gpu"].values == pytest.approx((4 * 3 * 10 / 8 / 2,))
    assert "the log has the times of only 2 of the 3 steps from step 3 to 5" in of_arm["step_time"].reason


def test_a_missing_value_has_a_reason(tmp_path: Path) -> None:
    folder = study_folder(tmp_path)
    failed(folder / "7B_Naive.1", "RUN-02", "a rank was killed")
    valid_run(folder / "7B_Z3.2", [1.0])
    folders.write_not_started(folder, {"7B_Naive.2": "no rows in DATADIR"})
    result = studies.read(folder)
    missing, one = cells(result, "7B Naive")["step_time"], cells(result, "7B Z3")["step_time"]
    assert (missing.mark, missing.value) == (Mark.no_result, None)
    assert missing.reason == "failed: RUN-02: a rank was killed; not run: no rows in DATADIR; not run"
    assert (one.values, one.deviation, one.reason) == ((1000.0,), None, "2 of 3 runs have no value (not run)")
    pair, never = result.differences
    assert pair.comparison is None and "a rank was killed" in pair.reason
    assert never.reason.startswith("7B Naive: failed") and never.reason.endswith("13B Naive: it swaps")


def test_the_note_of_an_arm_is_shown_with_its_values(tmp_path: Path) -> None:
    text = STUDY.replace("cases:\n", "cases:\n  - {match: {method: Naive}, note: it trains adapters}\n")
    folder = study_folder(tmp_path, text)
    for block in (1, 2, 3):
        valid_run(folder / f"7B_Naive.{block}", [1.0])
    result = studies.read(folder)
    assert cells(result, "7B Naive")["step_time"].reason == "it trains adapters"
    assert cells(result, "13B Naive")["step_time"].reason == "it trains adapters; it swaps"
    assert cells(result, "7B Z3")["step_time"].reason == "not run"


def test_a_log_that_was_edited_after_its_run_has_no_value(tmp_path: Path) -> None:
    folder = study_folder(tmp_path)
    valid_run(folder / "7B_Naive.1", [1.0])
    ledger = folder / "7B_Naive.1/ledger.json"
    entries = [entry | {"log_sha256": "0" * 64, "log_bytes": 1} for entry in json.loads(ledger.read_text())]
    ledger.write_text(json.dumps(entries))
    cell = cells(studies.read(folder), "7B Naive")["step_time"]
    assert cell.value is None and cell.reason.startswith("the log has changed since its trial ended")


def test_pairs_are_the_blocks_that_both_arms_have(tmp_path: Path) -> None:
    """The second arm lacks block 2. In the others its steps are 10 % longer, up to a few thousandths."""
    folder = study_folder(tmp_path, STUDY + "runs: 4\n")
    for block, (first, second) in enumerate([(1.0, 1.1), (5.0, None), (1.0, 1.102), (1.0, 1.098)], 1):
        valid_run(folder / f"7B_Naive.{block}", [first])
        if second is not None:
            valid_run(folder / f"7B_Z3.{block}", [second])
    comparison = studies.read(folder).differences[0].comparison
    assert comparison is not None and comparison.verdict is Verdict.different and comparison.is_better
    assert comparison.first == (1000.0, 1000.0, 1000.0) and comparison.second == (1100.0, 1102.0, 1098.0)
    assert comparison.ratio == pytest.approx(1 / 1.1, abs=1e-4)


def test_published_figures_are_shown_with_the_arms_of_their_labels(tmp_path: Path) -> None:
    """The log has one sample of 10 tokens per second, on two GPUs."""
    folder = study_folder(tmp_path)
    valid_run(folder / "7B_Naive.1", [1.0])
    result = studies.read(folder)
    by_arm = {row.arm: [one.value for one in row.published["throughput_per_gpu"]] for row in result.rows}
    assert by_arm == {"7B Naive": [100.0], "7B Z3": [], "13B Naive": [50.0], "13B Z3": [50.0]}
    (table,) = result.tables
    assert table.columns == (("7B",), ("13B",))
    assert table.rows == ((("Naive",), ("7B Naive", "13B Naive")), (("Z3",), ("7B Z3", "13B Z3")))
    shown = list(study_sheets.sheets(result))[0]
    assert shown.columns == ("method", "7B", "13B")
    assert [tuple(row) for row in shown.rows] == [
        ("Naive", "5.00", "X"), ("  theirs", "100", "50"), ("Z3", "-", "-"), ("  theirs", "", "50"),
    ]  # fmt: skip
    assert "X not recommended" in shown.caption and "1 of 9 runs are valid" in shown.caption
    assert "time: published in min, not in s" in shown.caption


def test_the_sheet_of_comparisons_names_the_arms_and_the_verdict(tmp_path: Path) -> None:
    (sheet,) = [one for one in study_sheets.sheets(study_results.precisions(tmp_path)) if one.title == "comparisons"]
    assert sheet.columns == ("arms", "measurement", "pairs", "difference (%)", "verdict")
    assert [tuple(row) for row in sheet.rows] == [
        ("fp8 / bf16", "throughput_per_gpu", "4", "+35.17 (+34.98 to +35.36)", "fp8 is 35.0–35.4 % faster than bf16"),
        ("bf16 / transformers", "step_time", "", "", "not compared: transformers has no result"),
    ]
    assert "margin ±2 %" in sheet.caption


def test_after_out_of_memory_the_next_micro_batch_is_used(tmp_path: Path) -> None:
    """Of 16, 14 and 13, 16 failed in the second block: every run uses 14, and the first run no longer counts."""
    searched = PlannedArm(name="7B Naive", micro_batch_size=16, global_batch_size=32, batches=(16, 14, 13))
    folder = study_folder(tmp_path, f"{STUDY}max_batch: {{limit: 16}}\nruns: 2\n", **{"7B Naive": searched})
    valid_run(folder / "7B_Naive.b16.1", [1.0])
    failed(folder / "7B_Naive.b16.2", "RUN-01", "a GPU ran out of memory")
    valid_run(folder / "7B_Naive.b14.1", [2.0])
    of_arm = cells(studies.read(folder), "7B Naive")
    assert (of_arm["micro_batch_size"].values, of_arm["step_time"].values) == ((14,), (2000.0,))
    assert of_arm["step_time"].runs == ("7B_Naive.b14.1",)
    assert of_arm["step_time"].reason.startswith("out of memory with micro-batches of 16; 1 of 2 runs")


def test_the_result_is_strict_json_with_mean_and_deviation(tmp_path: Path) -> None:
    folder = study_folder(tmp_path)
    for block, seconds in enumerate((1.0, 1.3, 1.1), 1):
        valid_run(folder / f"7B_Naive.{block}", [seconds])
    result = studies.read(folder)
    text = json.dumps(asdict(result), allow_nan=False)
    (cell,) = [row["cells"]["step_time"] for row in json.loads(text)["rows"] if row["arm"] == "7B Naive"]
    assert (cell["value"], cell["deviation"]) == pytest.approx((fmean(cell["values"]), stdev(cell["values"])))
    assert atomic_files.read(folder / folders.ARMS)[0]["name"] == "7B Naive"


def test_further_valid_runs_are_noted(tmp_path: Path) -> None:
    """As after --runs 5 and a call without it: three runs count, and a failed one is not noted."""
    folder = study_folder(tmp_path)
    for block in (1, 2, 3, 4):
        valid_run(folder / f"7B_Naive.{block}", [1.0])
    failed(folder / "7B_Naive.5", "RUN-02", "a rank was killed")
    result = studies.read(folder)
    assert cells(result, "7B Naive")["step_time"].n == 3
    assert "1 valid runs in later blocks are not counted; to count these runs: --runs 5" in result.notes
    followed = studies.read(folder, runs=5)
    assert cells(followed, "7B Naive")["step_time"].n == 4 and len(followed.order) == 5
    assert not [note for note in followed.notes if "not counted" in note]


def test_a_table_counts_the_requested_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = study_folder(tmp_path)
    for block in (1, 2, 3, 4):
        valid_run(folder / f"7B_Naive.{block}", [1.0])
    with pytest.raises(SystemExit) as ended:
        cli.main(["study", str(folder), "--table", "--runs", "4", "--json"])
    (row,) = [row for row in answers.one(capsys.readouterr().out)["rows"] if row["arm"] == "7B Naive"]
    assert (ended.value.code, len(row["cells"]["step_time"]["values"])) == (0, 4)


def test_an_excessive_number_of_runs_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line or a file: 100,000,000,000 runs would need too much memory."""
    for words in (["tiny", "cluster=local", "--dry-run"], [str(study_folder(tmp_path))]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["study", *words, "--runs", "100000000000"])
        printed = capsys.readouterr().err
        assert ended.value.code == 2 and "100000000000 runs of each arm, but must have" in printed
    with pytest.raises(
        ConfigError,
        match=r"1001 runs of each arm, but must have 1 to 1,000 runs\n.*mine.yaml: runs\n.*set runs to a number from 1",
    ):
        study_folder(tmp_path, f"{STUDY}runs: 1001\n")
    stored = tmp_path / "mine-here" / folders.STUDY
    stored.write_text(stored.read_text().replace("study:\n", "study:\n  runs: 100000000000\n"))
    with pytest.raises(ConfigError, match=r"where: .*study.yaml: runs"):
        studies.read(stored.parent)


def test_costs_follow_the_window_and_the_scaled_times(tmp_path: Path) -> None:
    """Two GPUs of 3.60 an hour are 0.002 a second. Steps have 4 rows of 10 tokens."""
    text = STUDY.replace(
        "pairs:",
        "  - {measurement: epoch_cost, title: epoch, unit: EUR, higher_is_better: false}\n"
        "  - {measurement: cost_per_million_tokens, title: tokens, unit: EUR, higher_is_better: false}\npairs:",
    )
    priced = {"price_per_gpu_hour": 3.6, "currency": "EUR"}
    folder = study_folder(tmp_path, text)
    valid_run(folder / "13B_Z3.1", [1.0, 1.0, 2.0, 2.0], data_source="pubmedqa", **priced)
    valid_run(folder / "7B_Z3.1", [1.0])
    short = cells(studies.read(folder), "13B Z3")["epoch_cost"]
    assert (short.mark, short.values) == (Mark.calculated, pytest.approx((150 * 0.002,)))
    assert cells(studies.read(folder), "7B Z3")["epoch_cost"].value is None, "a log without a price has no cost"
    (tmp_path / "windowed").mkdir()
    windowed = text.replace("  - {match: {arm: 13B Z3}, calculated: {steps: 4, of_steps: 100}}\n", "")
    folder = study_folder(tmp_path / "windowed", f"{windowed}window: {{skip_steps: 2, steps: 2}}\n")
    valid_run(folder / "7B_Z3.1", [9.0, 9.0, 1.0, 3.0], **priced)
    tokens = cells(studies.read(folder), "7B Z3")["cost_per_million_tokens"]
    assert tokens.values == pytest.approx((1e6 / (2 * 40) * 4 * 0.002,)), "80 tokens in 4 s"
