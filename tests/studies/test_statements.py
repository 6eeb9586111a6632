"""The statements of a study are judged by the runs in its folder, next to the published figures."""

import re
from pathlib import Path

import pytest
from test_spec import written

from bench import cli, studies
from bench.console import study as study_sheets
from bench.errors import ConfigError
from bench.report.study.layout import layout_of
from bench.report.study.markdown import markdown
from bench.results.statement import StatementVerdict
from bench.results.study import Mark, PlannedArm, StudyResult
from bench.studies import arms as arms_of
from bench.studies import folder as folders
from bench.studies import library
from bench.studies.folder import StoredStudy
from helpers import answers
from helpers.study_runs import failed, valid_run

HOLDS, DOES_NOT_HOLD = StatementVerdict.holds, StatementVerdict.does_not_hold
HEAD = """
title: t
question: q
source: s
axes: {model: {7B: [], 13B: []}, method: {Naive: [], Z3: [], Z3+O: []}}
columns:
  - {measurement: throughput_per_gpu, title: speed, unit: tokens/s/GPU, higher_is_better: true}
  - {measurement: step_time, title: step time, unit: ms, higher_is_better: false}
window: {skip_steps: 0, steps: 1}
published: [theirs]
"""
STATEMENTS = """
statements:
  - text: ZeRO 3 costs at most half of the speed.
    source: finding 2
    measurement: throughput_per_gpu
    at_least: 0.5
    same: [model]
    arms: [{first: {method: Z3}, second: {method: Naive}}]
  - text: Offloading costs more than half of the speed.
    measurement: throughput_per_gpu
    at_most: 0.5
    same: [model]
    arms: [{first: {method: Z3+O}, second: {method: Z3}}]
  - text: A step of Naive takes less than two seconds.
    measurement: step_time
    at_most: 2000
    arms: [{first: {method: Naive}}]
  - text: On an H200 offloading is free.
    measurement: throughput_per_gpu
    at_least: 0.98
    gpus: [H200]
    arms: [{first: {method: Z3+O}, second: {method: Z3}}]
"""
THEIRS = """
title: theirs
place: p. 1, table 1
hardware: 8 GPUs
date: "2024"
columns: [{measurement: throughput_per_gpu, unit: tokens/s/GPU}]
rows:
  - {labels: {model: 7B, method: Naive}, printed: ["100"]}
  - {labels: {model: 7B, method: Z3}, printed: ["81"]}
  - {labels: {model: 7B, method: Z3+O}, printed: ["60"]}
"""


def study_folder(tmp_path: Path, statements: str = STATEMENTS) -> Path:
    config_dir = written(tmp_path, HEAD + statements)
    (tmp_path / "published").mkdir(exist_ok=True)
    (tmp_path / "published/theirs.yaml").write_text(THEIRS)
    study = library.load("mine", config_dir=config_dir)
    publications = library.publications(study, config_dir=config_dir)
    stored = StoredStudy(name="mine", cluster="here", overrides=(), study=study, publications=publications)
    names = [f"{model} {method}" for model in ("7B", "13B") for method in ("Naive", "Z3", "Z3+O")]
    planned = [PlannedArm(name=name, device="NVIDIA A800 SXM 80GB") for name in names[:-1]]
    planned.append(PlannedArm(name=names[-1], mark=Mark.no_result, reason="too large", runs=False))
    with folders.locked(tmp_path / "mine-here", stored, planned):
        pass
    return tmp_path / "mine-here"


def measured(tmp_path: Path) -> Path:
    """Return a study with three blocks: Z3 is 25 % slower, Z3+O takes three times as long with much spread."""
    folder = study_folder(tmp_path)
    for block, (drift, offload) in enumerate([(1.0, 3.0), (1.02, 1.5), (0.99, 6.0)], 1):
        for model, scale in (("7B", 1.0), ("13B", 1.9)):
            valid_run(folder / f"{model}_Naive.{block}", [scale * drift])
            valid_run(folder / f"{model}_Z3.{block}", [1.25 * scale * drift])
        valid_run(folder / f"7B_Z3_O.{block}", [1.25 * drift * offload])
    return folder


def verdicts(result: StudyResult) -> list[StatementVerdict]:
    return [one.verdict for one in result.statements]


@pytest.mark.long
def test_statements_are_judged_by_the_runs(tmp_path: Path) -> None:
    result = studies.read(measured(tmp_path))
    slower, offloaded, quick, elsewhere = result.statements
    assert slower.verdict is StatementVerdict.holds and len(slower.intervals) == 2
    assert slower.reason.endswith("Naive is 0.8, the closest of 2")
    (ours,) = slower.published
    assert (ours.publication, ours.n, ours.low, ours.within) == ("theirs", 1, 0.81, True)
    assert offloaded.verdict is StatementVerdict.undecided, "1.5 to 6 times as long: the interval includes 2"
    assert "across the bound; 1 of 2 pairs cannot run here" in offloaded.reason
    assert not offloaded.published[0].within, "60 of 81 is more than half"
    assert quick.verdict is StatementVerdict.holds and quick.reason.startswith("13B Naive is 1,8")
    assert elsewhere.verdict is StatementVerdict.not_measured
    assert elsewhere.reason == "it is about H200, not NVIDIA A800 SXM 80GB"


@pytest.mark.long
def test_a_verdict_flips_with_the_data(tmp_path: Path) -> None:
    folder = study_folder(tmp_path)
    assert verdicts(studies.read(folder)) == [StatementVerdict.not_measured] * 4
    for block, drift in enumerate((1.0, 1.02, 0.99), 1):
        for model in ("7B", "13B"):
            valid_run(folder / f"{model}_Naive.{block}", [drift])
            valid_run(folder / f"{model}_Z3.{block}", [drift * (2.5 if model == "13B" else 1.25)])
    result = studies.read(folder)
    assert result.statements[0].verdict is StatementVerdict.does_not_hold
    assert result.statements[0].reason == "13B Z3 / 13B Naive is 0.4, not ≥ 0.5"
    assert result.statements[2].verdict is StatementVerdict.holds, "one second, in every run and both models"


@pytest.mark.long
def test_statements_are_shown_on_every_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = measured(tmp_path)
    result = studies.read(folder)
    (sheet,) = [one for one in study_sheets.sheets(result) if one.title == "statements"]
    assert [row[-1] for row in sheet.rows][:2] == ["holds", "undecided"] and sheet.rows[0][3] == "0.8"
    assert sheet.rows[1][5] == "0.741 (theirs: outside)"
    text = markdown(result, layout_of(result, tmp_path))
    assert "| ZeRO 3 costs at most half of the speed. | speed | ≥ 0.5 | 0.8 | 3 | 0.81 (theirs) |" in text
    with pytest.raises(SystemExit):
        cli.main(["study", str(folder), "--json"])
    first = answers.one(capsys.readouterr().out)["statements"][0]
    assert (first["verdict"], first["source"]) == ("holds", "finding 2")
    assert first["intervals"][0]["low"] == pytest.approx(0.8)


def test_whether_arms_fit_is_judged_by_runs_and_else_by_the_plan(tmp_path: Path) -> None:
    statements = """
statements:
  - {text: Naive does not fit., fits: false, arms: [{first: {method: Naive}}]}
  - {text: Z3 fits., fits: true, arms: [{first: {method: Z3}}]}
  - {text: All fit., fits: true, arms: [{first: {}}]}
"""
    folder = study_folder(tmp_path, statements)
    estimated = [
        *(("7B Naive", False, 90.0), ("7B Z3", True, 70.0), ("7B Z3+O", None, None)),
        *(("13B Naive", True, 79.0), ("13B Z3", True, 60.0), ("13B Z3+O", True, 10.0)),
    ]
    planned = [
        PlannedArm(name=name, fits=fits, needed_gib=gib, capacity_gib=80, runs=fits is not False, reason="too large")
        for name, fits, gib in estimated
    ]
    with folders.locked(folder, folders.read(folder), planned):
        pass
    before = studies.read(folder).statements
    assert [one.verdict for one in before] == [DOES_NOT_HOLD, HOLDS, DOES_NOT_HOLD]
    assert before[0].reason == "13B Naive: ~ 79.0 of 80 GiB by the plan"
    assert before[2].reason == "7B Naive: ~ 90.0 of 80 GiB by the plan"
    failed(folder / "13B_Naive.1", "RUN-01", "a GPU ran out of memory")
    valid_run(folder / "7B_Z3.1", [1.0])
    after = studies.read(folder).statements
    assert after[0].verdict is HOLDS and "13B Naive: it ran out of memory" in after[0].reason
    assert after[1].reason == "7B Z3: it ran; 13B Z3: ~ 60.0 of 80 GiB by the plan"


@pytest.mark.long
def test_a_session_estimates_arms_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: ZeRO 3 of 6.74 billion weights on one GPU has 16 bytes for each, 100.4 GiB, before activations."""
    monkeypatch.setenv("LOGDIR", str(tmp_path))
    session = studies.begin("dissect_few_gpus", ["cluster=dgx1", "gpu@cluster.gpu=a800"])
    by_name = {arm.name: arm for arm in session.planned}
    assert {name: arm.fits for name, arm in by_name.items()} == {
        "Z2 1": False,
        "Z2 2": None,
        "Z2 4": True,
        "Z2 8": True,
        "Z3 1": False,
        "Z3 2": None,
        "Z3 4": True,
        "Z3 8": True,
    }
    needed = by_name["Z3 1"].needed_gib
    assert needed and 16 * 6.738e9 / 2**30 < needed < 1.15 * 16 * 6.738e9 / 2**30
    assert not by_name["Z3 1"].runs


@pytest.mark.parametrize(
    ("there", "wrong", "message"),
    [
        ("at_least: 0.5", "runs: 3", r"unknown key 'runs'"),
        ("    at_least: 0.5\n", "", r"at_least is not set and at_most is not set, but[\s\S]*statements\[0\]"),
        ("at_least: 0.5", "at_least: 2\n    at_most: 1", r"at_least is 2.0 and at_most is 1.0"),
        ("at_least: 0.5", "fits: true", r"the statement has the key `fits`, which cannot be used with `measurement`"),
        ("at_least: 0.5", "at_least: 0", r"at_least is 0.0 and at_most is not set"),
        (
            "measurement: throughput_per_gpu\n    at_least: 0.5",
            "measurement: mfu\n    at_least: 1",
            r"the column with the measurement 'mfu' does not exist",
        ),
        (
            "{method: Z3}, second",
            "{method: Z4}, second",
            r"no pair of arms has the labels \{'method': 'Z4'\}",
        ),
        ("{method: Z3}, second", "{size: Z3}, second", r"the label 'size' does not exist"),
        ("same: [model]", "same: [mode]", r"the label 'mode' does not exist[\s\S]*mean model\?"),
        (
            "second: {method: Naive}",
            "second: {method: Z3, model: 13B}",
            r"no pair of arms has the labels",
        ),
    ],
)
def test_a_mistake_in_a_statement_is_reported(tmp_path: Path, there: str, wrong: str, message: str) -> None:
    assert there in STATEMENTS
    with pytest.raises(ConfigError, match=message):
        study_folder(tmp_path, STATEMENTS.replace(there, wrong, 1))


@pytest.mark.long
def test_the_documents_own_figures_agree_with_its_findings(tmp_path: Path) -> None:
    """On its A800; finding 1 names all configurations, and its own table has an opposite one."""
    outside, findings = [], set[int]()
    for name, study in library.titles():
        if not study.statements:
            continue
        publications = library.publications(study)
        stored = StoredStudy(name=name, cluster="a800", overrides=(), study=study, publications=publications)
        planned = [PlannedArm(name=arm.name) for arm in arms_of.build(study, where=name)]
        with folders.locked(tmp_path / name, stored, planned):
            pass
        for one in studies.read(tmp_path / name).statements:
            findings |= {int(number) for number in re.findall(r"finding (\d)", one.source)}
            figures = [each for each in one.published if not each.publication.endswith(("3090", "4090", "nvlink"))]
            outside += [one.text for each in figures if not each.within]
    assert outside == ["With one row on each GPU, DeepSpeed trains faster than Megatron."]
    assert findings == set(range(1, 9))
