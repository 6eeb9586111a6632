"""Arms as planned: what runs, what cannot and why, and what is a mistake; nothing is started."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from test_spec import COLUMNS, written

from bench.errors import ConfigError
from bench.planning import compose
from bench.results.study import Mark, PlannedArm
from bench.studies import arms as study_arms
from bench.studies import library, session

H200 = "cluster=dgxh200 cluster.num_nodes=1 cluster.ranks_per_node=1 model.weights=random"
Planned = Callable[..., list[PlannedArm]]
STUDY = f"title: t\nquestion: q\nsource: ours\n{COLUMNS}\n"


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Plan the arms of a study that conf/ would have."""
    monkeypatch.setattr(library, "CONF", tmp_path)

    def planned(study: str, *words: str) -> list[PlannedArm]:
        written(tmp_path, STUDY + study)
        return list(session.begin("mine", [*words, f"cluster.paths.logs={tmp_path}"]).planned)

    return planned


def test_what_does_not_fit_or_is_not_there_has_its_reason_and_the_rest_is_planned(planned: Planned) -> None:
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
    assert "GiB per GPU needed, and a" in by_name["large"].reason
    assert {name: arm.reason for name, arm in by_name.items() if arm.is_missing} == {
        "peer": "engine accelerate is not there",
        "elsewhere": "cluster lsf is not there",
        "embeds": "task embed_images is not there",
        "of a new kind": "task embed is not there",
    }
    assert "tp 3 does not divide" in by_name["odd"].reason


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("recipe.learning_rate=1", r"no key 'recipe.learning_rate'[\s\S]*arm 'wrong'"),
        ("task=lora_7bb", r"no choice 'lora_7bb'[\s\S]*arm 'wrong': task[\s\S]*did you mean lora_7b\?"),
        ("model=llama9", r"no choice 'llama9'[\s\S]*arm 'wrong'"),
        ("precision=fp7", r"fp7[\s\S]*arm 'wrong'"),
    ],
)
def test_a_mistake_in_an_arm_is_an_error_and_no_dash(planned: Planned, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(f"arms: {{right: {{}}, wrong: {{overrides: [{override}]}}}}")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cluster=nowhere", r"no choice 'nowhere'"),
        ("trials=3", r"trials is set by the study[\s\S]*--runs"),
        ("launch.folder=x", r"launch.folder is set by the study"),
        ("seed=3", r"no key 'seed'"),
    ],
)
def test_a_mistake_on_the_command_line_is_an_error(planned: Planned, word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned("arms: {one: {}}", word)


def test_runs_are_as_long_as_the_study_says(planned: Planned) -> None:
    """A window is skipped steps and counted ones; a calculated arm runs the shorter number; X runs nothing."""
    tiny = "overrides: [task=pretrain_tiny, model.weights=random]\narms: {a: {}, b: {}, c: {}}\n"
    window = "window: {skip_steps: 30, steps: 100}"
    assert [arm.steps for arm in planned(f"{tiny}{window}")] == [130] * 3
    cases = "cases: [{match: {arm: b}, calculated: {steps: 40, of_steps: 1000}}, {match: {arm: c}, not_advisable: no}]"
    found = planned(f"{tiny}{cases}")
    assert [arm.steps for arm in found] == [320, 40, None]
    assert (found[2].mark, found[2].reason, found[2].runs) == (Mark.not_advisable, "no", False)


def test_the_largest_batch_is_the_last_that_the_plan_takes(planned: Planned) -> None:
    """One sample more is refused for its memory; after it each one tried is an eighth smaller, down to one."""
    arm = "arms: {one: {overrides: [task=lora_7b, precision=bf16]}}\n"
    (found,) = planned(f"{arm}max_batch: {{limit: 256}}", *H200.split())
    best = found.batches[0]
    assert 1 < best < 256 and (found.micro_batch_size, found.global_batch_size) == (best, best)
    words = ["task=lora_7b", "precision=bf16", *H200.split()]
    with pytest.raises(ConfigError, match="GiB per GPU needed"):
        compose.compose([*words, f"recipe.micro_batch_size={best + 1}", f"recipe.global_batch_size={best + 1}"])
    assert found.batches[-1] == 1 and all(b == a - max(1, a // 8) for a, b in pairwise(found.batches))
    (limited,) = planned(f"{arm}max_batch: {{limit: 2}}", *H200.split())
    assert limited.batches == (2, 1)


def test_each_arm_of_a_pair_is_first_as_often_as_last() -> None:
    arms = [PlannedArm(name=name) for name in "abc"]
    drawn = {study_arms.blocks(arms, runs=2, seed=seed)[0] for seed in range(50)}
    assert len(drawn) == 6, "every order is drawn"
    for seed in range(5):
        found = study_arms.blocks(arms, runs=6, seed=seed)
        assert found[:4] == study_arms.blocks(arms, runs=4, seed=seed), "more runs leave the earlier blocks as they are"
        assert sum(block.index("a") < block.index("b") for block in found) == 3
        without = study_arms.blocks([arms[0], arms[1], PlannedArm(name="c", runs=False)], runs=6, seed=seed)
        assert without == [tuple(name for name in block if name != "c") for block in found]
