"""The task llama31_8b follows MLPerf's own rule files, and preflight refuses each value that differs from them."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.rcp_checker import rcp_checker

from bench import preflight
from bench.contract import plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.training import Trains
from bench.errors import ConfigError
from bench.mlperf import closed_division
from bench.planning import compose

RULESETS = ("5.1.0", "6.0.0", "6.1.0")
CHECKER, REFERENCE = Path(mlp_compliance.__file__).parent, Path(rcp_checker.__file__).parent
SIZES = (16, 32, 64, 96, 128)

WRONG: dict[str, str] = {
    "max_sequence_length": "data.seq_length=4096",
    "opt_end_learning_rate": "recipe.lr_min_factor=0",
    "opt_learning_rate_decay_steps": "task.training.max_steps=1199999",
    "opt_adamw_beta_1": "recipe.adam_beta1=0.95",
    "opt_adamw_beta_2": "recipe.adam_beta2=0.999",
    "opt_adamw_epsilon": "recipe.adam_eps=1e-8",
    "opt_adamw_weight_decay": "recipe.weight_decay=0.01",
    "opt_gradient_clip_norm": "recipe.clip_grad=0.3",
    "eval_samples": "data.eval_rows=512",
    "eval_accuracy": "task.training.target_eval_loss=3.4",
    "max_steps": "task.training.max_steps=2000",
    "submission_benchmark": "task.benchmark=llama2_70b_lora",
}
"""By key of the rule files: an override that makes a log wrong."""
NO_SETTING = {
    "opt_name": "AdamW is the only optimizer",
    "opt_learning_rate_decay_schedule": "a cosine with linear warm-up is the only schedule",
    "gradient_accumulation_steps": "the plan derives it",
    "global_batch_size": "the rules allow any",
    "opt_base_learning_rate": "the rules allow any",
    "opt_learning_rate_warmup_steps": "the rules allow any",
}
BEYOND_THE_RULE_FILES = (
    *("data=c4", "data.source=prepared", "recipe.eval_every_samples=8192"),
    "task.training.starts_from=checkpoint",
    *("recipe.eval_skip=1", "model.num_layers=16", "model.rope_base=10000", "task.submittable=false"),
)


def planned(*overrides: str) -> TrainingPlan:
    return plan_kinds.required(compose.compose(["task=llama31_8b", "cluster=dgxh200", *overrides]), TrainingPlan)


def rule_files(ruleset: str) -> dict[str, Any]:
    files = (CHECKER / f"training_{ruleset}/closed_{name}.yaml" for name in ("common", "llama31_8b"))
    return {rule["KEY"]["NAME"]: rule["KEY"] for file in files for rule in yaml.safe_load(file.read_text())}


@pytest.mark.long
@pytest.mark.parametrize("ruleset", RULESETS)
def test_learning_rate_and_warm_up_are_those_of_the_reference_points(ruleset: str) -> None:
    points = json.loads((REFERENCE / f"training_{ruleset}/rcps_llama31_8b.json").read_text()).values()
    assert sorted(point["BS"] for point in points) == list(SIZES)
    for point in points:
        recipe = planned(f"recipe.global_batch_size={point['BS']}", "cluster.num_nodes=2").recipe
        hyper = point["Hyperparams"]
        assert recipe.lr == hyper["opt_base_learning_rate"]
        assert recipe.lr_warmup_steps == hyper["opt_learning_rate_warmup_samples"] // point["BS"]


@pytest.mark.long
def test_own_learning_rate_and_warm_up_replace_the_reference() -> None:
    recipe = planned("recipe.global_batch_size=48", "recipe.lr=6e-4", "recipe.lr_warmup_steps=100").recipe
    assert (recipe.lr, recipe.lr_warmup_steps, recipe.reference_points) == (6e-4, 100, None)
    assert planned("recipe.lr=6e-4").recipe.lr_warmup_steps == 4096 // 32


def test_a_batch_size_without_reference_point_needs_both_values() -> None:
    with pytest.raises(
        ConfigError, match="recipe.lr is not set, and .* has no entry for recipe.global_batch_size=48"
    ) as refusal:
        planned("recipe.global_batch_size=48")
    assert "set recipe.global_batch_size to one of 16, 32, 64, 96, 128, or set recipe.lr and recipe.lr_warmup" in str(
        refusal.value
    )


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cluster", ["dgxh200", "dgx2"])
def test_defaults_are_of_the_closed_division(cluster: str, size: int) -> None:
    plan = planned(f"cluster={cluster}", f"recipe.global_batch_size={size}")
    assert (plan.submission.division, plan.submission.deviations) == ("closed", [])
    assert "not a submission" not in plan.submission.org
    assert not {f.rule for f in preflight.inspect(plan)} & {"CFG-03", "CFG-04", "CFG-14"}
    every = math.ceil(12288 / size)
    assert plan.evaluation.at_steps[:2] == [every, 2 * every]
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


@pytest.mark.parametrize("ruleset", RULESETS)
def test_every_key_of_the_rule_files_is_a_setting_or_derived(ruleset: str) -> None:
    assert set(rule_files(ruleset)) == WRONG.keys() | NO_SETTING.keys()


@pytest.mark.long
@pytest.mark.parametrize("override", [*WRONG.values(), *BEYOND_THE_RULE_FILES])
def test_preflight_refuses_other_values_than_the_rules(override: str) -> None:
    plan = planned(override)
    problems = [finding for finding in preflight.inspect(plan) if finding.rule == "CFG-14"]
    assert problems and all(finding.severity == "error" for finding in problems)
    key = override.partition("=")[0]
    assert key.startswith("task.") or any(finding.where == key for finding in problems)
    assert plan.submission.division == "open"


@pytest.mark.long
@pytest.mark.parametrize("override", ["data.answer_only=true", "data.document_mask=true"])
def test_prepared_rows_with_another_loss_or_mask_are_refused_for_both(override: str) -> None:
    problems = preflight.inspect(planned("data.source=prepared", override))
    refused = {finding.where for finding in problems if finding.rule == "CFG-14"}
    assert refused == {"data.source", override.partition("=")[0]}


def test_adapters_are_not_the_whole_model() -> None:
    config = planned().config
    training = dataclasses.replace(config.training, trains=Trains.lora)
    changed = dataclasses.replace(config, task=dataclasses.replace(config.task, training=training))
    assert closed_division.deviations(changed) == ["task.training.trains is lora, but the rules require all"]


@pytest.mark.long
def test_open_division_is_a_choice() -> None:
    chosen = planned("task.division=open", "recipe.clip_grad=0.3")
    assert chosen.submission.division == "open"
    assert "CFG-14" not in {finding.rule for finding in preflight.inspect(chosen)}
    assert planned("task.division=open").submission.division == "open", "also with the values of the rules"
    speed = planned("model.weights=random", "task.training.max_steps=200")
    assert "CFG-14" not in {finding.rule for finding in preflight.inspect(speed)}
    assert (speed.submission.benchmark, speed.submission.shape_of) == (None, "llama31_8b")


def test_the_learning_rate_rises_linearly_and_falls_by_a_cosine_to_a_tenth() -> None:
    plan = planned()
    lr, warm_up, last = plan.recipe.lr, plan.recipe.lr_warmup_steps, plan.max_steps
    assert plan_kinds.learning_rate(plan, 1) == pytest.approx(lr / warm_up)
    assert plan_kinds.learning_rate(plan, warm_up) == plan_kinds.learning_rate(plan, warm_up + 1) == lr
    halfway = warm_up + (last - warm_up) // 2 + 1
    assert plan_kinds.learning_rate(plan, halfway) == pytest.approx(0.55 * lr)
    assert plan_kinds.learning_rate(plan, last + 1) == pytest.approx(0.1 * lr)
