"""Every refusal of a study's file, whole: what is wrong, where, and what to change."""

from pathlib import Path

import pytest
from test_spec import written

from bench.errors import ConfigError
from bench.studies import checks, library
from helpers import golden

REFUSALS = Path(__file__).with_name("study_refusals.txt")
STUDY = """
title: a table
question: which?
source: ours
axes:
  model: {7B: [task=lora_7b], 13B: [task=lora_13b]}
  method: {Naive: [], Z3: [precision=bf16]}
arms: {alone: {labels: {model: 7B, method: none}}}
columns:
  - {measurement: step_time, title: step, higher_is_better: false}
  - {measurement: own_number, title: own, higher_is_better: true, unit: kg}
"""
NAIVE, OF_7B, Z3 = "{method: Naive}", "{model: 7B}", "{method: Z3}"
WRONG = (
    *("runs: 0", "runs: -3", "runs: 1001"),
    *("margin: 0", "margin: 1", "margin: -0.5"),
    *("device: gpu", "device: auto"),
    *("window: {skip_steps: -1, steps: 1}", "window: {skip_steps: 0, steps: 0}"),
    *("max_batch: {limit: 0}", "max_batch: {limit: -2}"),
    "coefficients: [{measurement: throughput}]",
    "coefficients: [{measurement: step_time, same: [size]}]",
    f"coefficients: [{{measurement: step_time, among: [{OF_7B}, {{sise: 7B}}]}}]",
    f"coefficients: [{{measurement: step_time, among: [{OF_7B}, {{model: 8B}}]}}]",
    f"coefficients: [{{measurement: step_time, among: [{OF_7B}, {NAIVE}]}}]",
    "coefficients: [{measurement: step_time}, {measurement: own_number}, {measurement: step_time}]",
    *(
        f"relatives: [{{{words}, title: t, higher_is_better: true}}]"
        for words in (
            f"name: r, measurement: mfu, reference: {NAIVE}, same: [model], match: {Z3}",
            f"name: r, measurement: step_time, reference: {NAIVE}, same: [models], match: {Z3}",
            f"name: r, measurement: step_time, reference: {{methods: Naive}}, same: [model], match: {Z3}",
            f"name: r, measurement: step_time, reference: {NAIVE}, same: [model], match: {{methods: Z3}}",
            f"name: own_number, measurement: step_time, reference: {NAIVE}, same: [model], match: {Z3}",
            f"name: r, measurement: step_time, reference: {{method: Z2}}, same: [model], match: {Z3}",
            f"name: r, measurement: step_time, reference: {NAIVE}, same: [model], match: {{method: Z2}}",
            f"name: r, measurement: step_time, reference: {NAIVE}, same: [], match: {Z3}",
        )
    ),
    "published_match: {theirs: {model: 7B}}",
    "published: [theirs]\npublished_match: {theirs: {model: 8B}}",
    "published: [theirs]\npublished_match: {their: {model: 7B}}",
    "published: [misspelt]",
    "pairs: [{first: 7B Z3, second: 8B Z3, measurement: step_time}]",
    "pairs: [{first: nothing, second: 7B Z3, measurement: step_time}]",
    "pairs: [{first: 7B Z3, second: alone, measurement: step_time}, {first: alone, second: alone, measurement: mfu}]",
    "pairs: [{first: 7B Z3, second: alone, measurement: step_tim}]",
    *(
        f"statements: [{{text: t, {words}}}]"
        for words in (
            f"measurement: step_time, arms: [{{first: {OF_7B}, second: {{model: 13B}}}}]",
            f"measurement: step_time, at_least: 0, arms: [{{first: {OF_7B}, second: {{model: 13B}}}}]",
            f"measurement: step_time, at_least: 2, at_most: 1, arms: [{{first: {OF_7B}, second: {{model: 13B}}}}]",
            f"measurement: mfu, at_least: 1, arms: [{{first: {OF_7B}, second: {{model: 13B}}}}]",
            f"measurement: step_time, at_least: 1, same: [size], arms: [{{first: {OF_7B}, second: {{model: 13B}}}}]",
            "measurement: step_time, at_least: 1, arms: [{first: {size: 7B}, second: {model: 13B}}]",
            f"measurement: step_time, at_least: 1, arms: [{{first: {OF_7B}, second: {{size: 13B}}}}]",
            f"measurement: step_time, at_least: 1, arms: [{{first: {OF_7B}, second: {{model: 8B}}}}]",
            "measurement: step_time, at_least: 1, same: [method, arm], "
            f"arms: [{{first: {OF_7B}, second: {{model: 13B}}}}]",
            "measurement: step_time, at_least: 1, arms: [{first: {model: 8B}}]",
            f"fits: true, measurement: step_time, arms: [{{first: {OF_7B}}}]",
            f"fits: false, at_least: 1, at_most: 2, arms: [{{first: {OF_7B}, second: {{model: 13B}}}}]",
        )
    ),
    *(
        f"references: [{{arm: {words}}}]"
        for words in (
            "7B Z3, measurement: mfu, value: 3, tolerance: 3%",
            "7B Z4, measurement: step_time, value: 3, tolerance: 3%",
            "7B Z3, measurement: step_time, value: 3, tolerance: 0.03",
            "7B Z3, measurement: step_time, value: 0, tolerance: 3%",
            "7B Z3, measurement: step_time, value: inf, tolerance: 3%",
        )
    ),
    *(
        f"tables: [{{title: t, measurement: {words}}}]"
        for words in (
            "step_time, rows: [size], columns: []",
            "step_time, rows: [model], columns: [size]",
            "step_time, rows: [model], columns: [method], match: {size: 7B}",
            "mfu, rows: [model], columns: [method]",
            "step_time, rows: [], columns: [arm]",
            "step_time, rows: [model], columns: []",
            "step_time, rows: [model], columns: [method], match: {model: 8B}",
        )
    ),
    *(
        f"cases: [{{match: {NAIVE}, calculated: {{steps: {steps}, of_steps: {of_steps}}}}}]"
        for steps, of_steps in ((0, 9), (9, 9))
    ),
    f"window: {{skip_steps: 0, steps: 1}}\ncases: [{{match: {NAIVE}, calculated: {{steps: 1, of_steps: 9}}}}]",
)
"""Lines that are added to the study."""
RIGHT = (
    *("runs: 1", "runs: 1000", "margin: 0.999", "device: cpu", "device: cuda"),
    *("window: {skip_steps: 0, steps: 1}", "max_batch: {limit: 1}"),
    f"coefficients: [{{measurement: step_time, same: [arm], among: [{NAIVE}, {Z3}]}}, {{measurement: own_number}}]",
    f"relatives: [{{name: r, measurement: step_time, title: t, reference: {NAIVE}, same: [model], match: {Z3}, "
    "higher_is_better: true}]\n"
    "tables: [{title: t, measurement: r, rows: [arm], columns: []}]",
    "pairs: [{first: 7B Z3, second: 13B Z3, measurement: own_number}]",
    "statements: [{text: t, measurement: step_time, at_least: 1, at_most: 1, arms: [{first: {model: 7B}, second: "
    "{model: 13B}}]}, {text: t, fits: true, arms: [{first: {arm: alone}}]}]",
    "references: [{arm: alone, measurement: step_time, value: 0.001, tolerance: 0.5%}]",
    "tables: [{title: t, rows: [model], columns: [], measurement: step_time, match: {method: Z3}}]",
    f"cases: [{{match: {NAIVE}, calculated: {{steps: 1, of_steps: 2}}}}]",
)
COLUMNS = (
    "columns: []",
    "columns: [{measurement: step_tme, title: step, higher_is_better: false}]",
    "columns: [{measurement: step_time, title: step, higher_is_better: false, unit: s}]",
    "columns: [{measurement: mfu, title: share, higher_is_better: true, unit: kg}]",
    f"columns: [{', '.join(3 * ['{measurement: mfu, title: share, higher_is_better: true}'])}]",
)
THEIRS = """
title: theirs
place: table 1
hardware: 8 GPUs
date: "2024"
columns: [{measurement: MEASUREMENT, unit: ms}]
rows: [{labels: {model: 7B}, printed: ["100"]}]
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "published").mkdir()
    for name, measurement in (("theirs", "step_time"), ("misspelt", "step_tme")):
        (tmp_path / f"published/{name}.yaml").write_text(THEIRS.replace("MEASUREMENT", measurement))
    return tmp_path


def load(folder: Path, text: str) -> None:
    study = library.load("mine", config_dir=written(folder, text))
    library.publications(study, config_dir=folder)


def test_every_refusal_is_that_of_the_golden_file(site: Path) -> None:
    """Each block has the lines that are added to the study, and what the user reads."""
    texts = [*((lines, f"{STUDY}{lines}\n") for lines in WRONG)]
    texts += [(lines, f"{STUDY.partition('columns:')[0]}{lines}\n") for lines in COLUMNS]
    blocks = []
    for lines, text in texts:
        with pytest.raises(ConfigError) as error:
            load(site, text)
        blocks.append(f"{lines}\n\n{str(error.value).replace(str(site), 'SITE')}\n")
    golden.require(f"\n{'-' * 100}\n".join(blocks), REFUSALS, variable="WRITE_REFUSALS")


@pytest.mark.parametrize("lines", RIGHT)
def test_a_study_at_the_limits_is_accepted(site: Path, lines: str) -> None:
    load(site, f"{STUDY}{lines}\n")


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("step_tmie", ["step_time"], True),
        ("step_time_forward", ["step_time"], False),
        ("memory", ["step_time"], False),
        ("step_times", ["step_time", "mfu"], True),
    ],
)
def test_a_known_name_with_a_word_appended_is_a_new_name(name: str, known: list[str], expected: bool) -> None:
    assert checks.alike(name, known) is expected
