"""Files of studies and published figures: what is wrong in one is named with its place, before anything is planned."""

from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.studies import arms, library

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


def test_arms_are_the_combinations_of_the_axes_with_what_the_cases_say(tmp_path: Path) -> None:
    found = arms.of(library.load("mine", config_dir=written(tmp_path, STUDY)), where="mine")
    assert [arm.name for arm in found] == ["7B Naive", "7B Z3", "7B 8", "13B Z3"]
    assert found[0].overrides == ("task=pretrain_tiny", "task=lora_7b", "seed_base=7")
    assert (found[0].not_advisable, found[1].not_advisable) == ("too slow", None)
    assert found[2].labels == {"model": "7B", "method": "8"}, "a number is a label like any other"
    assert found[3].overrides == ("task=pretrain_tiny", "task=lora_13b", "precision=bf16")


def test_arms_stand_in_the_order_of_the_file(tmp_path: Path) -> None:
    listed, axes = "arms: {alone: {}}\n", "axes: {model: {7B: []}}\n"
    for parts, expected in (((listed, axes), ["alone", "7B"]), ((axes, listed), ["7B", "alone"])):
        text = "title: t\nquestion: q\nsource: s\n" + "".join(parts) + COLUMNS
        study = library.load("mine", config_dir=written(tmp_path, text))
        assert [arm.name for arm in arms.of(study, where="mine")] == expected


COLUMNS = "columns: [{measurement: step_time, title: step, higher_is_better: false}]"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("repeats: 3", r"no key 'repeats'"),
        ("run: 3", r"no key 'run'[\s\S]*did you mean runs\?"),
        ("runs: three", r"Expected int, got str[\s\S]*mine.yaml: runs"),
        ("runs: 0", r"0 runs of each arm"),
        ("margin: 2", r"margin is 2[\s\S]*between 0 and 1"),
        ("window: {skip_steps: 3}", r"steps is missing[\s\S]*window"),
        ("window: {skip_steps: 3, steps: 0}", r"window has no step"),
        ("max_batch: {limit: 0}", r"max_batch.limit is 0"),
        ("? [a, b]\n: c", r"a key is a word, and this one is \['a', 'b'\], line 13"),
        ("? {a: b}\n: c", r"a key is a word, and this one is \{'a': 'b'\}, line 13"),
        ("title: again", r"the key 'title' stands twice, line 13"),
        ("arms: {7B_Naive: {}}", r"'7B Naive' and '7B_Naive' would share a folder"),
        ("arms: {'!': {}}", r"'!' names no folder"),
        ("pairs: [{first: 7B Z3, second: 7B z3, measurement: step_time}]", r"no arm '7B z3'[\s\S]*mean 7B Z3\?"),
        ("pairs: [{first: 7B Z3, second: 7B Z3, measurement: step_time}]", r"compared with itself"),
        ("pairs: [{first: 7B Z3, second: 7B 8, measurement: mfu}]", r"no column of the measurement 'mfu'"),
        (
            "tables: [{title: t, rows: [size], columns: [], measurement: step_time}]",
            r"no label 'size'[\s\S]*tables\[0\]",
        ),
        (
            "tables: [{title: t, rows: [model], columns: [], measurement: step_time}]",
            r"'7B Naive' and '7B Z3' have the same place in the table 't'[\s\S]*tables\[0\]",
        ),
        ("tables: [{title: t, rows: [], columns: [arm], measurement: step_time}]", r"no label names the rows of 't'"),
        ("published: [nowhere]", r"no published file 'nowhere'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, wrong: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        library.load("mine", config_dir=written(tmp_path, f"{STUDY}{wrong}\n"))


@pytest.mark.parametrize(
    ("there", "wrong", "message"),
    [
        (
            "measurement: step_time",
            "measurement: step_tme",
            r"no measurement 'step_tme'[\s\S]*did you mean step_time\?",
        ),
        ("model: 13B, method: [", "model: 13b, method: [", r"matches no arm: model: 13b[\s\S]*cases\[0\]"),
        ("title: step,", "title: step, unit: s,", r"step_time is in ms, not in 's'[\s\S]*set unit: ms"),
        (COLUMNS, "columns: []", r"a study without columns"),
        ("not_advisable: too slow", "calculated: {steps: 9, of_steps: 9}", r"calculated from 9 of 9 steps"),
        ("question: which?", "", r"question is missing"),
    ],
)
def test_what_contradicts_itself_is_named(tmp_path: Path, there: str, wrong: str, message: str) -> None:
    assert there in STUDY
    with pytest.raises(ConfigError, match=message):
        library.load("mine", config_dir=written(tmp_path, STUDY.replace(there, wrong)))


def test_a_calculated_arm_has_no_window(tmp_path: Path) -> None:
    calculated = STUDY.replace("leave_out: true", "calculated: {steps: 1, of_steps: 9}")
    with pytest.raises(ConfigError, match=r"13B Naive is calculated from 1 steps, and window says"):
        library.load("mine", config_dir=written(tmp_path, f"{calculated}window: {{skip_steps: 1, steps: 1}}\n"))


def test_every_study_that_is_shipped_loads() -> None:
    assert "tiny" in [name for name, _ in library.titles()]
