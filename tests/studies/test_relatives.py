"""Columns relative to a reference arm: scaling efficiency, and by which share an arm is slower."""

import math
from pathlib import Path
from statistics import geometric_mean, stdev

import pytest
from test_spec import written

from bench import studies
from bench.errors import ConfigError
from bench.results.study import Mark, PlannedArm, StudyResult
from bench.studies import arms as arms_of
from bench.studies import folder as folders
from bench.studies import library
from bench.studies.folder import StoredStudy
from helpers.study_runs import valid_run

STUDY = """
title: t
question: q
source: s
labels: {model: 7B}
axes: {gpus: {1: [], 8: []}, system: {bare: [], pods: []}}
columns: [{measurement: step_time, title: step time, unit: ms, higher_is_better: false}]
relatives:
  - name: relative_step_time
    measurement: step_time
    title: relative
    reference: {gpus: 1}
    same: [system]
    higher_is_better: false
  - name: faster_by
    measurement: step_time
    title: faster by
    reference: {system: bare}
    same: [gpus]
    match: {system: pods}
    is_reduction: true
    higher_is_better: true
tables: [{title: times, rows: [gpus], columns: [system], measurement: relative_step_time}]
window: {skip_steps: 0, steps: 3}
published: [theirs, elsewhere]
published_match: {elsewhere: {system: bare}}
"""
FIGURES = """
title: theirs
place: p. 1, table 1
hardware: 8 GPUs
date: "2024"
figures:
  - {labels: {model: 7B, gpus: 8}, measurement: relative_step_time, printed: "1.2"}
  - {labels: {model: 13B, gpus: 8}, measurement: relative_step_time, printed: "1.3"}
not_measured: a test of the remark
"""
ONE_S, EIGHT_S = (0.10, 0.11, 0.12), (0.12, 0.13, 0.15)


@pytest.fixture
def result(tmp_path: Path) -> StudyResult:
    config_dir = written(tmp_path, STUDY)
    (tmp_path / "published").mkdir()
    for name in ("theirs", "elsewhere"):
        (tmp_path / f"published/{name}.yaml").write_text(FIGURES)
    study = library.load("mine", config_dir=config_dir)
    publications = library.publications(study, config_dir=config_dir)
    stored = StoredStudy(name="mine", cluster="here", overrides=(), study=study, publications=publications)
    planned = [PlannedArm(name=arm.name) for arm in arms_of.build(study, where="mine")]
    with folders.locked(tmp_path / "mine-here", stored, planned):
        pass
    for arm, times in {"1_bare": ONE_S, "8_bare": EIGHT_S, "8_pods": ONE_S}.items():
        for block, time_s in enumerate(times, 1):
            valid_run(tmp_path / f"mine-here/{arm}.{block}", [time_s] * 3)
    return studies.read(tmp_path / "mine-here")


@pytest.mark.long
def test_a_value_is_divided_by_that_of_the_arm_with_the_reference_labels(result: StudyResult) -> None:
    cell = result.row("8 bare").cells["relative_step_time"]
    ratios = [a / b for a, b in zip(EIGHT_S, ONE_S, strict=True)]
    half_width = 4.302653 * stdev(map(math.log, ratios)) / math.sqrt(3)  # the quantile of t with 2 degrees of freedom
    assert cell.value == pytest.approx(geometric_mean(ratios)) and cell.values == pytest.approx(ratios)
    ends = [geometric_mean(ratios) * math.exp(sign * half_width) for sign in (-1, 1)]
    assert [cell.low, cell.high] == pytest.approx(ends) and cell.reason == "relative to 1 bare"
    assert result.row("1 bare").cells["relative_step_time"].value == 1


@pytest.mark.long
def test_a_reduction_is_one_minus_the_ratio_with_its_interval_in_order(result: StudyResult) -> None:
    cell = result.row("8 pods").cells["faster_by"]
    ratios = [a / b for a, b in zip(ONE_S, EIGHT_S, strict=True)]
    assert cell.value == pytest.approx(1 - geometric_mean(ratios))
    assert cell.values == pytest.approx([1 - ratio for ratio in ratios])
    assert cell.low is not None and cell.high is not None and cell.low < cell.value < cell.high
    assert cell.text == f"{cell.value:.3g} ({cell.low:.3g} to {cell.high:.3g})"


def test_an_arm_without_a_reference_has_a_reason(result: StudyResult) -> None:
    reasons = {arm: result.row(arm).cells for arm in ("1 pods", "8 pods", "8 bare")}
    assert reasons["8 pods"]["relative_step_time"].reason == "the reference 1 pods has no value: not run"
    assert reasons["8 bare"]["faster_by"].reason == "the study does not compare this arm with another arm"
    never = reasons["1 pods"]["faster_by"]
    assert (never.mark, never.reason) == (Mark.no_result, "not run")


@pytest.mark.long
def test_a_table_is_shown_next_to_its_own_arms_and_the_labels_of_the_study_count(result: StudyResult) -> None:
    shown = {row.arm: [one.publication for one in row.published["relative_step_time"]] for row in result.rows}
    assert shown == {"1 bare": [], "1 pods": [], "8 bare": ["theirs", "elsewhere"], "8 pods": ["theirs"]}
    assert result.row("8 bare").labels["model"] == "7B"
    assert "theirs: no arm measures 2 of 2 figures: a test of the remark" in result.notes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("reference: {gpus: 1}", "reference: {gpus: 2}", "`reference` has the labels {'gpus': '2'}, but no arm"),
        ("match: {system: pods}", "match: {system: ray}", "`match` has the labels {'system': 'ray'}, but no arm"),
        ("same: [system]", "same: []", "a group of arms has two reference arms, '1 bare' and '1 pods'"),
        ("same: [system]", "same: [job]", "the label 'job' does not exist"),
        ("name: faster_by", "name: step_time", "the name is 'step_time', but another column already has this name"),
        (
            "measurement: step_time\n    title: faster",
            "measurement: mfu\n    title: faster",
            "the column with the meas",
        ),
        ("{elsewhere: {system", "{elsewhere: {job", "the entry elsewhere has the labels"),
        (
            "published_match: {elsewhere",
            "published_match: {nowhere",
            "the published table of this study 'nowhere' does not exist",
        ),
    ],
)
def test_a_relative_column_that_contradicts_the_study_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert STUDY.count(old) == 1
    with pytest.raises(ConfigError, match=message):
        library.load("mine", config_dir=written(tmp_path, STUDY.replace(old, new)))
