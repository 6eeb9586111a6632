"""Planned arms: which run, which cannot and why, and which are mistakes."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from test_spec import COLUMNS, written

from bench.errors import ConfigError
from bench.planning import compose
from bench.results.study import Mark, PlannedArm
from bench.studies import arms as study_arms
from bench.studies import library, session, tables
from bench.studies.tables import ArmRuns

H200 = "cluster=dgxh200 cluster.num_nodes=1 cluster.ranks_per_node=1 model.weights=random"
Planned = Callable[..., list[PlannedArm]]
STUDY = f"title: t\nquestion: q\nsource: ours\n{COLUMNS}\n"


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Plan the arms of a study in a conf/ folder."""
    monkeypatch.setattr(library, "CONF", tmp_path)

    def planned(study: str, *overrides: str) -> list[PlannedArm]:
        written(tmp_path, STUDY + study)
        return list(session.begin("mine", [*overrides, f"cluster.paths.logs={tmp_path}"]).planned)

    return planned


@pytest.mark.long
def test_arms_that_do_not_fit_or_do_not_exist_have_a_reason_and_the_others_are_planned(planned: Planned) -> None:
    arms = """
arms:
  fits: {overrides: [task=lora_7b, precision=bf16]}
  large: {overrides: [task=pretrain_70b, precision=bf16]}
  peer: {overrides: [task=lora_7b, engine=accelerate]}
  elsewhere: {overrides: [task=lora_7b, cluster=lsf]}
  embeds: {overrides: [task=embed_images]}
  of a new kind: {overrides: [task=lora_7b, task.kind=embed]}
  odd: {overrides: [task=lora_7b, parallel.tp=3]}
"""
    by_name = {arm.name: arm for arm in planned(arms, *H200.split())}
    fits = by_name.pop("fits")
    assert fits.runs and fits.step_time_ms and fits.memory_gib and fits.gpu_hours
    assert fits.gpu_hours == pytest.approx(fits.step_time_ms / 3.6e6 * (fits.steps or 0))
    assert all(arm.mark is Mark.no_result and not arm.runs for arm in by_name.values())
    assert "GiB per GPU, but a" in by_name["large"].reason
    assert {name: arm.reason for name, arm in by_name.items() if arm.is_missing} == {
        "peer": "engine accelerate does not exist",
        "elsewhere": "cluster lsf does not exist",
        "embeds": "task embed_images does not exist",
        "of a new kind": "task embed does not exist",
    }
    assert "tp 3 does not divide" in by_name["odd"].reason


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe.learning_rate=1", r"unknown key 'recipe.learning_rate'[\s\S]*arm 'wrong'"),
        ("task=lora_7bb", r"task=lora_7bb does not exist[\s\S]*arm 'wrong': task[\s\S]*did you mean lora_7b\?"),
        ("model=llama9", r"model=llama9 does not exist[\s\S]*arm 'wrong'"),
        ("precision=fp7", r"fp7[\s\S]*arm 'wrong'"),
    ],
)
def test_a_mistake_in_an_arm_is_an_error(planned: Planned, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(f"arms: {{right: {{}}, wrong: {{overrides: [{override}]}}}}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("cluster=nowhere", r"cluster=nowhere does not exist"),
        ("trials=3", r"trials cannot be overridden, because the study sets this key itself[\s\S]*--runs"),
        ("launch.folder=x", r"launch.folder cannot be overridden, because the study sets this key itself"),
        ("seed=3", r"unknown key 'seed'"),
    ],
)
def test_a_mistake_on_the_command_line_is_an_error(planned: Planned, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned("arms: {one: {}}", override)


FIGURES = """
title: t
place: p
hardware: h
date: "2024"
columns: [{measurement: step_time, unit: ms, labels: {}}]
rows: [{labels: {model: 7B}, printed: ["5"]}]
"""
LABELLED = """
axes: {model: {7B: [task=lora_7b]}, gpus: {1: [cluster.ranks_per_node=1]}}
published: [theirs]
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("override", "is_changed"),
    [
        ("model=tiny", True),
        ("precision=fp8", True),
        ("recipe.micro_batch_size=1", True),
        ("cluster.ranks_per_node=2", True),
        ("cluster.num_nodes=2", False),
        ("model=llama2_7b", False),
        ("gpu@cluster.gpu=h100", False),
        ("walltime=7", False),
        ("+cluster.slurm.vboost=1", False),
    ],
)
def test_an_override_that_contradicts_the_labels_takes_the_published_figures_away(
    planned: Planned, tmp_path: Path, override: str, is_changed: bool
) -> None:
    (tmp_path / "published").mkdir()
    (tmp_path / "published/theirs.yaml").write_text(FIGURES)
    (arm,) = planned(LABELLED, "cluster=dgxh200", "model.weights=random", override)
    assert arm.changed == ((override,) if is_changed else ())
    built = study_arms.build(library.load("mine"), where="mine")[0]
    runs = ArmRuns(arm=built, planned=arm, valid=[], missing={}, too_large=())
    row = tables.row(runs, library.load("mine"), library.publications(library.load("mine")))
    assert [one.printed for one in row.published["step_time"]] == ([] if arm.changed else ["5"])


def test_runs_have_the_number_of_steps_of_the_study(planned: Planned) -> None:
    """With a window, runs have the skipped and the measured steps; a calculated arm runs fewer; X does not run."""
    tiny = "overrides: [task=pretrain_tiny, model.weights=random]\narms: {a: {}, b: {}, c: {}}\n"
    window = "window: {skip_steps: 30, steps: 100}"
    assert [arm.steps for arm in planned(f"{tiny}{window}")] == [130] * 3
    cases = "cases: [{match: {arm: b}, calculated: {steps: 40, of_steps: 1000}}, {match: {arm: c}, not_advisable: no}]"
    result = planned(f"{tiny}{cases}")
    assert [arm.steps for arm in result] == [320, 40, None]
    assert (result[2].mark, result[2].reason, result[2].runs) == (Mark.not_advisable, "no", False)


@pytest.mark.long
def test_the_largest_batch_is_the_largest_that_can_be_planned(planned: Planned) -> None:
    """One sample more does not fit into memory; each following one is 1/8 smaller, down to one."""
    arm = "arms: {one: {overrides: [task=lora_7b, precision=bf16]}}\n"
    (result,) = planned(f"{arm}max_batch: {{limit: 256}}", *H200.split())
    best = result.batches[0]
    assert 1 < best < 256 and (result.micro_batch_size, result.global_batch_size) == (best, best)
    overrides = ["task=lora_7b", "precision=bf16", *H200.split()]
    with pytest.raises(ConfigError, match="GiB per GPU"):
        compose.compose([*overrides, f"recipe.micro_batch_size={best + 1}", f"recipe.global_batch_size={best + 1}"])
    assert result.batches[-1] == 1 and all(b == a - max(1, a // 8) for a, b in pairwise(result.batches))
    (limited,) = planned(f"{arm}max_batch: {{limit: 2}}", *H200.split())
    assert limited.batches == (2, 1)


def test_each_arm_of_a_pair_is_first_as_often_as_last() -> None:
    arms = [PlannedArm(name=name) for name in "abc"]
    orders = {study_arms.blocks(arms, runs=2, seed=seed)[0] for seed in range(50)}
    assert len(orders) == 6, "every order occurs"
    for seed in range(5):
        result = study_arms.blocks(arms, runs=6, seed=seed)
        assert result[:4] == study_arms.blocks(arms, runs=4, seed=seed), "more runs do not change earlier blocks"
        assert sum(block.index("a") < block.index("b") for block in result) == 3
        without = study_arms.blocks([arms[0], arms[1], PlannedArm(name="c", runs=False)], runs=6, seed=seed)
        assert without == [tuple(name for name in block if name != "c") for block in result]


@pytest.mark.long
def test_an_override_that_makes_the_arms_of_an_axis_equal_is_refused(planned: Planned) -> None:
    """A key that only some choices set, one that all set to the same value, and the cluster are not refused."""
    axes = """
overrides: [task=lora_7b, precision=bf16]
axes:
  gpus: {1: [cluster.ranks_per_node=1, recipe.lr=1e-4], 2: [cluster.ranks_per_node=2, recipe.lr=1e-4]}
  batch: {plan: [], small: [recipe.micro_batch_size=1]}
  place: {here: [cluster=dgxh200], there: [cluster=dgx1]}
"""
    with pytest.raises(ConfigError) as refused:
        planned(axes, "cluster.ranks_per_node=8")
    assert "the axis gpus of this study sets cluster.ranks_per_node" in refused.value.what
    assert refused.value.where == "cluster.ranks_per_node=8" and "remove the axis gpus" in refused.value.fix
    allowed = ("cluster=dgx2", "recipe.lr=2e-4", "recipe.micro_batch_size=2")
    assert [arm.num_ranks for arm in planned(axes, *allowed)] == [1] * 4 + [2] * 4
