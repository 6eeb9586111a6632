"""Files of studies: mistakes are reported with their place before anything is planned."""

from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.results.study import PlannedArm
from bench.studies import arms, folder, library
from bench.studies.spec import Jobs

STUDY = """
title: a table
question: which?
source: ours
overrides: [task=pretrain_tiny]
axes:
  model: {7B: [task=lora_7b], 13B: [task=lora_13b]}
  method: {Naive: [], Z3: [precision=bf16], 8: [trials=1]}
cases:
  - {match: {model: 13B, method: [Naive, 8]}, leave_out: true}
  - {match: {model: 7B, method: Naive}, not_advisable: too slow, overrides: [seed_base=7]}
columns: [{measurement: step_time, title: step, higher_is_better: false}]
"""


def written(folder: Path, text: str, *, name: str = "mine") -> Path:
    (folder / "study").mkdir(exist_ok=True)
    (folder / f"study/{name}.yaml").write_text(text)
    return folder


def test_arms_are_the_combinations_of_the_axes_with_the_matching_cases(tmp_path: Path) -> None:
    study = arms.build(library.load("mine", config_dir=written(tmp_path, STUDY)), where="mine")
    assert [arm.name for arm in study] == ["7B Naive", "7B Z3", "7B 8", "13B Z3"]
    assert study[0].overrides == ("task=pretrain_tiny", "task=lora_7b", "seed_base=7")
    assert (study[0].not_advisable, study[1].not_advisable) == ("too slow", None)
    assert study[2].labels == {"model": "7B", "method": "8"}, "a number is a label like any other"
    assert study[3].overrides == ("task=pretrain_tiny", "task=lora_13b", "precision=bf16")


def test_arms_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    listed, axes = "arms: {alone: {}}\n", "axes: {model: {7B: []}}\n"
    for parts, expected in (((listed, axes), ["alone", "7B"]), ((axes, listed), ["7B", "alone"])):
        text = "title: t\nquestion: q\nsource: s\n" + "".join(parts) + COLUMNS
        study = library.load("mine", config_dir=written(tmp_path, text))
        assert [arm.name for arm in arms.build(study, where="mine")] == expected


COLUMNS = "columns: [{measurement: step_time, title: step, higher_is_better: false}]"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("repeats: 3", r"unknown key 'repeats'[\s\S]*did you mean runs\?"),
        ("run: 3", r"unknown key 'run'[\s\S]*did you mean runs\?"),
        ("runs: three", r"Expected int, got str[\s\S]*mine.yaml: runs"),
        ("runs: 0", r"0 runs of each arm"),
        ("margin: 2", r"margin is 2[\s\S]*between 0 and 1"),
        ("window: {skip_steps: 3}", r"steps is missing[\s\S]*window"),
        (
            "window: {skip_steps: 3, steps: 0}",
            r"window.steps is 0 and window.skip_steps is 3, but steps must be 1 or more",
        ),
        ("max_batch: {limit: 0}", r"max_batch.limit is 0"),
        ("? [a, b]\n: c", r"the key \['a', 'b'\] is not a text, line 13"),
        ("? {a: b}\n: c", r"the key \{'a': 'b'\} is not a text, line 13"),
        ("title: again", r"duplicate key 'title', line 13"),
        ("arms: {7B_Naive: {}}", r"'7B Naive' and '7B_Naive' of the study have the same folder name"),
        ("arms: {'!': {}}", r"the arm name '!' has no letter or digit"),
        (
            "pairs: [{first: 7B Z3, second: 7B z3, measurement: step_time}]",
            r"the arm '7B z3' does not exist[\s\S]*mean 7B Z3\?",
        ),
        ("pairs: [{first: 7B Z3, second: 7B Z3, measurement: step_time}]", r"compares the arm 7B Z3 with itself"),
        (
            "pairs: [{first: 7B Z3, second: 7B 8, measurement: mfu}]",
            r"the column with the measurement 'mfu' does not exist",
        ),
        (
            "tables: [{title: t, rows: [size], columns: [], measurement: step_time}]",
            r"the label 'size' does not exist[\s\S]*tables\[0\]",
        ),
        (
            "tables: [{title: t, rows: [model], columns: [], measurement: step_time}]",
            r"'7B Naive' and '7B Z3' are in the same cell of the table 't'[\s\S]*tables\[0\]",
        ),
        ("tables: [{title: t, rows: [], columns: [arm], measurement: step_time}]", r"`rows` of the table 't' is empty"),
        (
            "references: [{arm: 7B Z3, measurement: step_time, value: 3, tolerance: 0.03}]",
            r"the tolerance is '0.03', but must be a percentage[\s\S]*references\[0\][\s\S]*tolerance: 3%",
        ),
        (
            "references: [{arm: 7B Z3, measurement: step_time, value: 3, tolerance: 0%}]",
            r"the tolerance is '0%', but must be a percentage above 0",
        ),
        (
            "references: [{arm: 7B Z3, measurement: step_time, value: 0, tolerance: 3%}]",
            r"the value is 0, but must be a number above 0",
        ),
        (
            "references: [{arm: 7B Z4, measurement: step_time, value: 3, tolerance: 3%}]",
            r"the arm '7B Z4' does not exist",
        ),
        ("published: [nowhere]", r"the published file 'nowhere' does not exist"),
    ],
)
def test_a_mistake_is_reported_with_its_place(tmp_path: Path, wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        library.load("mine", config_dir=written(tmp_path, f"{STUDY}{wrong}\n"))


@pytest.mark.parametrize(
    ("there", "wrong", "message"),
    [
        (
            "measurement: step_time",
            "measurement: step_tme",
            r"the measurement 'step_tme' does not exist[\s\S]*did you mean step_time\?",
        ),
        (
            "model: 13B, method: [",
            "model: 13b, method: [",
            r"`match` of this case has the labels model: 13b, method: .*, but no arm[\s\S]*cases\[0\]",
        ),
        ("title: step,", "title: step, unit: s,", r"the unit of step_time is ms[\s\S]*set unit: ms"),
        (COLUMNS, "columns: []", r"the study has no columns"),
        (
            "not_advisable: too slow",
            "calculated: {steps: 9, of_steps: 9}",
            r"calculated.steps of the arm 7B Naive is 9, but must be",
        ),
        ("question: which?", "", r"question is missing"),
    ],
)
def test_a_contradiction_is_reported(tmp_path: Path, there: str, wrong: str, message: str) -> None:
    assert there in STUDY
    with pytest.raises(ConfigError, match=message):
        library.load("mine", config_dir=written(tmp_path, STUDY.replace(there, wrong)))


def test_a_calculated_arm_has_no_window(tmp_path: Path) -> None:
    calculated = STUDY.replace("leave_out: true", "calculated: {steps: 1, of_steps: 9}")
    with pytest.raises(ConfigError, match=r"`window` of the study and `calculated` of the arm 13B Naive both set"):
        library.load("mine", config_dir=written(tmp_path, f"{calculated}window: {{skip_steps: 1, steps: 1}}\n"))


def test_keys_and_values_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """`of` in coefficients and `jobs: in_turn` of a study; `words` of a stored one."""
    coefficients = "coefficients: [{of: step_time}]\njobs: in_turn\n"
    study = library.load("mine", config_dir=written(tmp_path, STUDY + coefficients))
    assert (study.coefficients[0].measurement, study.jobs) == ("step_time", Jobs.sequential)
    stored = f"name: n\ncluster: c\nwords: [task=a]\npublications: {{}}\nstudy: {{{', '.join(FLAT)}}}\n"
    (tmp_path / "study.yaml").write_text(stored)
    read = folder.read(tmp_path)
    assert (read.overrides, read.study.coefficients[0].measurement) == (("task=a",), "step_time")


FLAT = (
    *("title: t", "question: q", "source: s", "arms: {a: {}}", "coefficients: [{of: step_time}]"),
    "columns: [{measurement: step_time, title: step, higher_is_better: false}]",
)
"""A study on one line, with a key of an earlier version."""


@pytest.mark.long
def test_every_shipped_study_loads() -> None:
    assert "tiny" in [name for name, _ in library.titles()]


def test_every_pair_of_blocks_has_an_order_of_its_own() -> None:
    """Shuffled, then reversed: drift within a block favours no arm, and no order is that of all blocks."""
    planned = [PlannedArm(name=name) for name in "abcdef"]
    orders = arms.blocks(planned, runs=8, seed=1)
    assert orders[1::2] == [order[::-1] for order in orders[::2]]
    assert len(set(orders[::2])) == 4 and all(sorted(order) == list("abcdef") for order in orders)
    assert arms.blocks(planned, runs=3, seed=1) == orders[:3] and arms.blocks(planned, runs=3, seed=2) != orders[:3]
