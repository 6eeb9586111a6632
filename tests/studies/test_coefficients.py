"""Efficiency coefficients in the tables of a study: the reference arm, intervals, and published coefficients."""

import csv
import io
import math
from pathlib import Path
from statistics import geometric_mean, stdev

import pytest
from test_spec import written

from bench import studies
from bench.errors import ConfigError
from bench.report.study.layout import layout_of
from bench.report.study.markdown import markdown
from bench.report.study.records import csv as to_csv
from bench.results.study import Mark, PlannedArm, StudyResult
from bench.studies import folder as folders
from bench.studies import library
from bench.studies.folder import StoredStudy
from helpers.study_runs import valid_run

STUDY = """
title: t
question: q
source: s
axes: {work: {A: [], B: []}, system: {old: [], new: [], "old, 2 nodes": [], "new, 2 nodes": []}}
cases:
  - {match: {work: B, system: "new, 2 nodes"}, not_advisable: too few steps}
columns:
  - {measurement: step_time, title: step time, unit: ms, higher_is_better: false}
  - {measurement: throughput, title: speed, unit: samples/s, higher_is_better: true}
coefficients:
  - {measurement: step_time, same: [work], among: [{system: [old, new]}, {system: ["old, 2 nodes", "new, 2 nodes"]}]}
  - {measurement: throughput, same: [work], among: [{system: [old, new]}]}
tables: [{title: times, rows: [work], columns: [system], measurement: step_time_coefficient}]
window: {skip_steps: 0, steps: 3}
published: [theirs]
"""
THEIRS = """
title: theirs
place: p. 1, table 1
hardware: 8 GPUs
date: "2024"
columns: [{labels: {system: old}}, {labels: {system: new}}]
rows:
  - {labels: {work: A, of: step_time}, measurement: efficiency_coefficient, printed: ["3.2", "1"]}
  - {labels: {work: A, of: throughput}, measurement: efficiency_coefficient, printed: ["0.25", "1"]}
"""
OLD_S, NEW_S = (0.93, 0.94, 0.92), (0.29, 0.295, 0.292)


def study_result(tmp_path: Path) -> StudyResult:
    """Return a study with planted run times in three blocks; one arm never ran."""
    config_dir = written(tmp_path, STUDY)
    (tmp_path / "published").mkdir()
    (tmp_path / "published/theirs.yaml").write_text(THEIRS)
    study = library.load("mine", config_dir=config_dir)
    publications = library.publications(study, config_dir=config_dir)
    stored = StoredStudy(name="mine", cluster="here", overrides=(), study=study, publications=publications)
    names = [f"{work} {system}" for work in "AB" for system in ("old", "new", "old, 2 nodes", "new, 2 nodes")]
    planned = [PlannedArm(name=name) for name in names[:-1]]
    planned.append(PlannedArm(name=names[-1], mark=Mark.not_advisable, reason="too few steps", runs=False))
    with folders.locked(tmp_path / "mine-here", stored, planned):
        pass
    for arm, times in {"A_old": OLD_S, "A_new": NEW_S, "B_old_2_nodes": OLD_S}.items():
        for block, time_s in enumerate(times, 1):
            valid_run(tmp_path / f"mine-here/{arm}.{block}", [time_s] * 3)
    return studies.read(tmp_path / "mine-here")


@pytest.mark.long
def test_a_coefficient_is_of_the_best_arm_of_its_group_with_the_interval_of_paired_logarithms(tmp_path: Path) -> None:
    result = study_result(tmp_path)
    old, new = (result.row(f"A {name}").cells["step_time_coefficient"] for name in ("old", "new"))
    ratios = [a / b for a, b in zip(OLD_S, NEW_S, strict=True)]
    half_width = 4.302653 * stdev(map(math.log, ratios)) / math.sqrt(3)  # the quantile of t with 2 degrees of freedom
    mean = geometric_mean(ratios)
    assert old.value == pytest.approx(mean) and old.values == pytest.approx(ratios)
    assert (old.low, old.high) == pytest.approx((mean * math.exp(-half_width), mean * math.exp(half_width)))
    assert (old.text, old.reason) == ("3.18 (3.11–3.25)", "relative to A new")
    assert (new.text, new.low, new.reason) == ("1", None, "the reference")
    rates = {name: result.row(f"A {name}").cells["throughput_coefficient"] for name in ("old", "new")}
    assert rates["old"].value == pytest.approx(1 / mean) and rates["new"].value == 1, "of rates the largest is best"


def test_an_arm_without_a_reference_has_a_reason_and_no_coefficient(tmp_path: Path) -> None:
    result = study_result(tmp_path)
    cells = {row.arm: row.cells for row in result.rows}
    alone, never = (cells[f"B {name}, 2 nodes"]["step_time_coefficient"] for name in ("old", "new"))
    assert (alone.mark, alone.reason) == (Mark.no_result, "no other arm of the same group has a value")
    assert (never.mark, never.reason) == (Mark.not_advisable, "too few steps")
    assert cells["B old"]["step_time_coefficient"].reason == "not run"
    nowhere = cells["B old, 2 nodes"]["throughput_coefficient"]
    assert (nowhere.value, nowhere.reason) == (None, "the study does not compare this arm with another arm")


@pytest.mark.long
def test_published_coefficients_are_in_the_column_of_the_measured_ones(tmp_path: Path) -> None:
    result = study_result(tmp_path)
    text = markdown(result, layout_of(result, tmp_path))
    assert "## times: efficiency coefficient" in text
    assert "3.18 (3.11–3.25)" in text and "| published, P1 | 3.2 | 1 |" in text and "0.25" not in text
    rows = {
        (row["measurement"], row["origin"]): row
        for row in csv.DictReader(io.StringIO(to_csv(result)))
        if row["arm"] == "A old"
    }
    ours, theirs = (rows["step_time_coefficient", origin] for origin in ("measured", "published"))
    assert [f"{float(ours[name]):.2f}" for name in ("value", "low", "high")] == ["3.18", "3.11", "3.25"]
    assert (theirs["printed"], rows["throughput_coefficient", "published"]["printed"]) == ("3.2", "0.25")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{measurement: throughput, same",
            "{measurement: mfu, same",
            "the column with the measurement 'mfu' does not exist",
        ),
        (
            "{measurement: throughput, same",
            "{measurement: step_time, same",
            "two entries of `coefficients` have the measurement step_time",
        ),
        ("same: [work]", "same: [job]", "the label 'job' does not exist"),
        ("[{system: [old, new]}]", "[{system: older}]", "an entry of `among` has the labels"),
        (
            "[{system: [old, new]}]",
            "[{system: [old, new]}, {work: A}]",
            "A old of the study matches two entries of `among`",
        ),
        ("measurement: step_time_coefficient", "measurement: step_time_coeff", "the column with the measurement"),
    ],
)
def test_coefficients_that_contradict_the_study_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        library.load("mine", config_dir=written(tmp_path, STUDY.replace(old, new)))
