"""Local SGD in the plan: layout of the groups, the estimate, and refused settings."""

import json
from typing import Any

import pytest

from bench.console.plan import rows
from bench.contract import groups, old_plans, plan_kinds
from bench.contract.local_sgd import Compress, LocalSgd
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError
from bench.planning import compose

LOCAL_SGD = "task=pretrain_tiny_local_sgd"
SLOW = ("cluster.network_gbs=0.00125", "recipe.local_sgd.step_time_s=0.5")
"""10 Mbit/s."""
TEN_GBIT = "cluster.network_gbs=0.15625"
"""10 Gbit/s per node with eight GPUs."""


def planned(*overrides: str) -> TrainingPlan:
    return plan_kinds.required(compose.compose(list(overrides)), plan_kinds.TrainingPlan)


@pytest.mark.long
def test_each_group_has_its_own_layout_and_a_share_of_the_batch() -> None:
    plan = planned("task=pretrain_7b_local_sgd", "cluster=dgx2", TEN_GBIT)
    assert (plan.world.groups, plan.world.num_ranks, plan.world.dp * plan.world.tp * plan.world.pp) == (2, 16, 8)
    assert plan.batch.global_batch_size == 128 and plan.batch.tokens_per_step == 128 * 4096
    assert 2 * 8 * plan.batch.micro_batch_size * plan.batch.gradient_accumulation_steps == 128
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan
    one = groups.of_group(plan)
    assert (one.world.num_nodes, one.world.num_ranks, one.world.groups, one.batch.global_batch_size) == (1, 8, None, 64)
    alone = planned("task=pretrain_7b", "cluster=dgx2", "cluster.num_nodes=1", "recipe.global_batch_size=64")
    assert plan.cost == alone.cost and plan.memory == alone.memory


def test_the_prediction_matches_hand_arithmetic() -> None:
    """525,440 numbers of 4 bytes, of which each of two ranks sends half twice, at 1.25 MB/s; steps of 0.5 s.

    By TCP a frame of 1538 bytes on the wire holds 1448; how synchronous gradients are sent is not known.
    """
    estimate = planned(LOCAL_SGD, *SLOW).local_sgd
    assert estimate is not None
    sent_s = 525_440 * 4 / 1.25e6
    exchange_s = sent_s * 1538 / 1448
    assert estimate.rank_bytes == 525_440 * 4 and estimate.exchange_s == pytest.approx(exchange_s)
    assert estimate.efficiency == pytest.approx(5.0 / (5.0 + exchange_s))
    assert estimate.break_even_one_group == pytest.approx(exchange_s / 0.5), "one group needs 1 s for the batch of two"
    assert estimate.synchronous_step_s == pytest.approx(0.5 + sent_s), "gradients, and new weights, half each"


@pytest.mark.parametrize(("compress", "size"), [("bf16", 2), ("int8", 1 + 4 / 256)])
def test_compression_reduces_bytes_and_overlap_hides_the_exchange(compress: str, size: float) -> None:
    """Of 32 weight averagings four precede an evaluation (the last one too), and cannot overlap."""
    words = (f"recipe.local_sgd.compress={compress}", "recipe.local_sgd.overlap_steps=1", *SLOW)
    estimate = planned(LOCAL_SGD, *words).local_sgd
    assert estimate is not None and estimate.rank_bytes == pytest.approx(525_440 * size)
    exchange_s = 525_440 * size / 1.25e6 * 1538 / 1448
    stopped_s = 4 * exchange_s + 28 * max(0.0, exchange_s - 0.5)
    assert estimate.efficiency == pytest.approx(160 / (160 + stopped_s))


def test_the_plan_shows_efficiency_and_break_even_or_the_missing_input() -> None:
    shown = dict(rows(planned(LOCAL_SGD, *SLOW, "recipe.local_sgd.every_steps=2", "recipe.eval_every_samples=1600")))
    assert shown["local SGD efficiency"].startswith("35.9 % (estimate): inner step 0.5 s, weight averaging 1.79 s")
    assert "faster than one group alone above H = 3.57 (X: this H is too small)" in shown["break-even H"]
    assert dict(rows(planned(LOCAL_SGD)))["local SGD efficiency"] == "not estimated: cluster.network_gbs is not set"
    unknown = dict(rows(planned(LOCAL_SGD, SLOW[0])))["local SGD efficiency"]
    assert unknown == "not estimated: a step time (recipe.local_sgd.step_time_s) is not set"


@pytest.mark.long
@pytest.mark.parametrize("through", [(), ("hydra.verbose=false",)])
@pytest.mark.parametrize("given", [("every_steps=10", "compress=int8"), ("={every_steps: 10, compress: int8}",)])
def test_any_training_task_can_use_local_sgd(given: tuple[str, ...], through: tuple[str, ...]) -> None:
    """By keys or in braces; composed by Hydra alone, and from what was kept."""
    words = [f"recipe.local_sgd{'' if setting[0] == '=' else '.'}{setting}" for setting in given]
    plan, config_yaml = compose.for_run(["task=pretrain_tiny", "parallel.groups=2", *words, *through])
    assert isinstance(plan, TrainingPlan) and plan.world.groups == 2
    assert plan.config.recipe.local_sgd == LocalSgd(every_steps=10, compress=Compress.int8)
    assert compose.read(config_yaml).recipe.local_sgd == plan.config.recipe.local_sgd


@pytest.mark.long
def test_a_task_has_no_local_sgd_by_default() -> None:
    plan, config_yaml = compose.for_run(["task=pretrain_tiny"])
    assert isinstance(plan, TrainingPlan) and plan.config.recipe.averaging is None
    assert "local_sgd" not in plan_kinds.dumps(plan)
    assert compose.read(config_yaml).recipe.averaging is None


REFUSED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "groups without local SGD": (
        ("task=pretrain_tiny", "parallel.groups=2"),
        "parallel.groups=2",
        "pretrain_tiny_local_sgd",
    ),
    "groups of kernels": (
        ("task=gemm", "cluster=dgx1", "parallel.groups=2"),
        "parallel.groups=2",
        "remove parallel.groups",
    ),
    "groups, and how to name it": (("task=pretrain_tiny", "parallel.groups=2"), "parallel.groups=2", "every_steps=100"),
    "no interval": (("task=pretrain_tiny", "recipe.local_sgd.outer_lr=0.7"), "outer_lr is set", "every_steps=100"),
    "no such key": (
        ("task=pretrain_tiny", "recipe.local_sgd={every_step: 1}"),
        "local_sgd.every_step",
        "every_steps?",
    ),
    "local SGD without groups": ((LOCAL_SGD, "parallel.groups=null"), "parallel.groups is null", "parallel.groups=2"),
    "three groups": ((LOCAL_SGD, "parallel.groups=3"), "cannot be split into 3 equal groups", "one of 1, 2"),
    "an odd batch": ((LOCAL_SGD, "recipe.global_batch_size=15"), "cannot be split equally over 2", "a multiple of 2"),
    "between averagings": ((LOCAL_SGD, "recipe.local_sgd.every_steps=7"), "evaluation after step 100", "112"),
    "no steps": ((LOCAL_SGD, "recipe.local_sgd.every_steps=0"), "every_steps is 0", "1 or more"),
    "overlap": ((LOCAL_SGD, "recipe.local_sgd.overlap_steps=10"), "overlap_steps is 10", "a number from 0 to 9"),
    "rate": ((LOCAL_SGD, "recipe.local_sgd.outer_lr=0"), "outer_lr is 0, but must", "0.7"),
    "momentum": ((LOCAL_SGD, "recipe.local_sgd.outer_momentum=1"), "outer_momentum is 1, but must", "0.9"),
    "mean": ((LOCAL_SGD, "recipe.local_sgd.outer_momentum=0.9"), "has no outer optimizer", "average=nesterov"),
    "limit": ((LOCAL_SGD, "recipe.local_sgd.time_limit_s=0"), "time_limit_s is 0.0, but must", "greater than 0"),
    "restarts": ((LOCAL_SGD, "recipe.local_sgd.restarts=-1"), "restarts=-1", "0 or more"),
    "elsewhere": (
        (LOCAL_SGD, "cluster=dgx2", "recipe.local_sgd.restarts=1"),
        "only there a single group can restart",
        "resume",
    ),
    "engine": ((LOCAL_SGD, "engine=huggingface"), "engine=huggingface does not support local SGD", "engine=megatron"),
    "target": ((LOCAL_SGD, "task.training.target_eval_loss=1"), "the task has a target loss", "target_eval_loss=null"),
    "whole optimizer": ((LOCAL_SGD, "parallel.distributed_optimizer=false"), "shards", "distributed_optimizer=true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_local_sgd_settings_are_refused(case: str) -> None:
    overrides, what, fix = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        compose.compose(list(overrides))
    error: Any = refused.value
    assert what in error.what and fix in error.fix, error


def test_old_task_names_still_compose_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert planned("task=pretrain_tiny_apart") == planned(LOCAL_SGD)
    assert caplog.messages == ["task=pretrain_tiny_apart was renamed: use task=pretrain_tiny_local_sgd"]
    assert compose.with_new_options(["task=lora_tiny,qlora_70b_apart", "trials=2"]) == [
        "task=lora_tiny,qlora_70b_local_sgd",
        "trials=2",
    ]


def test_an_old_plan_is_read_with_its_estimate() -> None:
    plan = planned(LOCAL_SGD, *SLOW)
    old = json.loads(plan_kinds.dumps(plan))
    prediction = old.pop("local_sgd")
    for key, new in old_plans.PREDICTION_KEYS.items():
        prediction[key] = prediction.pop(new)
    old |= {"version": 4, "apart": prediction}
    assert plan_kinds.loads(json.dumps(old)) == plan
