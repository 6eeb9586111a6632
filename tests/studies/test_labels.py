"""Arms whose model the command line replaces are named after the model that they ran."""

from pathlib import Path

import pytest
from test_spec import written

from bench import studies
from bench.console import study as study_sheets
from bench.results.study import PlannedArm
from bench.studies import arms as arms_of
from bench.studies import folder as folders
from bench.studies import library, plans
from bench.studies.folder import StoredStudy
from bench.studies.plans import Request
from helpers.study_runs import valid_run

STUDY = """
title: t
question: q
source: s
overrides: [model.weights=random, recipe.lr_warmup_steps=0]
axes: {engine: {ours: []}, model: {7B: [task=pretrain_7b], 13B: [task=pretrain_13b]}}
arms: {alone: {labels: {model: 7B}, overrides: [task=pretrain_7b]}}
columns: [{measurement: step_time, title: step time, unit: ms, higher_is_better: false}]
pairs: [{first: ours 13B, second: ours 7B, measurement: step_time}]
statements:
  - {text: 13B is slower., measurement: step_time, at_least: 1, arms: [{first: {model: 13B}, second: {model: 7B}}]}
tables: [{title: steps, rows: [engine], columns: [model], measurement: step_time, match: {engine: ours}}]
window: {skip_steps: 0, steps: 1}
published: [theirs]
"""
THEIRS = """
title: theirs
place: table 1
hardware: 8 GPUs
date: "2024"
columns: [{measurement: step_time, unit: ms}]
rows: [{labels: {model: 7B}, printed: ["100"]}, {labels: {model: 13B}, printed: ["190"]}]
"""


def planned(tmp_path: Path, *words: str) -> dict[str, PlannedArm]:
    study = library.load("mine", config_dir=site(tmp_path))
    request = Request(study=study, arms=arms_of.build(study, where="mine"), cli_overrides=["cluster=dgx1", *words])
    return {arm.name: arm for arm in plans.plan_arms(request)}


def site(tmp_path: Path) -> Path:
    (tmp_path / "published").mkdir(exist_ok=True)
    (tmp_path / "published/theirs.yaml").write_text(THEIRS)
    return written(tmp_path, STUDY)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {""}),
        (("model.weights=random", "recipe.lr=1e-4"), {""}),
        (("model=tiny",), {"tiny"}),
        (("model.num_layers=2",), {"llama2_7b of other sizes", "llama2_13b of other sizes"}),
        (("model=llama2_7b",), {"", "llama2_7b"}),
    ],
)
def test_only_another_model_is_named(tmp_path: Path, words: tuple[str, ...], expected: set[str]) -> None:
    assert {arm.model for arm in planned(tmp_path, *words).values()} == expected


@pytest.mark.long
def test_rows_name_the_model_that_ran_without_figures_of_another(tmp_path: Path) -> None:
    study, words = library.load("mine", config_dir=site(tmp_path)), ("cluster=dgx1", "model=tiny")
    publications = library.publications(study, config_dir=tmp_path)
    stored = StoredStudy(name="mine", cluster="dgx1", overrides=words, study=study, publications=publications)
    folder = tmp_path / "mine-dgx1"
    with folders.locked(folder, stored, list(planned(tmp_path, "model=tiny").values())):
        pass
    for block, drift in enumerate((1.0, 1.01, 0.99), 1):
        valid_run(folder / f"ours_7B.{block}", [drift])
        valid_run(folder / f"ours_13B.{block}", [2 * drift])
    result = studies.read(folder)
    assert [row.arm for row in result.rows] == [
        *("ours tiny instead of 7B", "ours tiny instead of 13B", "alone (tiny)"),
    ]
    assert result.row("ours tiny instead of 7B").cells["step_time"].runs[0] == "ours_7B.1"
    shown = next(iter(study_sheets.sheets(result)))
    assert list(shown.columns) == ["engine", "tiny instead of 7B", "tiny instead of 13B"]
    assert [tuple(row) for row in shown.rows] == [("ours", "1,000 ± 10", "2,000 ± 20")], "no published line"
    assert "the arms ran the model tiny, which the command line sets" in shown.caption
    (one,), (stated,) = result.differences, result.statements
    assert one.comparison and one.comparison.names == ("ours tiny instead of 13B", "ours tiny instead of 7B")
    assert stated.text == "13B is slower. (judged with model tiny)" and not stated.published
    assert "alone (tiny)" in stated.reason
