"""Groups that train apart: their layout, what the plan predicts of merging them, and what is refused."""

from typing import Any

import pytest

from bench.console.plan import rows
from bench.contract import groups, plan_kinds
from bench.contract.local_sgd import Compress, LocalSgd
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError
from bench.planning import compose

APART = "task=pretrain_tiny_apart"
SLOW = ("cluster.network_gbs=0.00125", "recipe.local_sgd.step_time_s=0.5")
"""10 Mbit/s."""
TEN_GBIT = "cluster.network_gbs=0.15625"
"""10 Gbit/s of a node with eight GPUs."""


def planned(*overrides: str) -> TrainingPlan:
    return plan_kinds.required(compose.compose(list(overrides)), plan_kinds.TrainingPlan)


def test_a_group_is_a_layout_of_its_own_and_all_of_them_share_the_batch() -> None:
    plan = planned("task=pretrain_7b_apart", "cluster=dgx2", TEN_GBIT)
    assert (plan.world.groups, plan.world.num_ranks, plan.world.dp * plan.world.tp * plan.world.pp) == (2, 16, 8)
    assert plan.batch.global_batch_size == 128 and plan.batch.tokens_per_step == 128 * 4096
    assert 2 * 8 * plan.batch.micro_batch_size * plan.batch.gradient_accumulation_steps == 128
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan
    one = groups.of_group(plan)
    assert (one.world.num_nodes, one.world.num_ranks, one.world.groups, one.batch.global_batch_size) == (1, 8, None, 64)
    alone = planned("task=pretrain_7b", "cluster=dgx2", "cluster.num_nodes=1", "recipe.global_batch_size=64")
    assert plan.cost == alone.cost and plan.memory == alone.memory


def test_the_prediction_is_that_of_hand_arithmetic() -> None:
    """525,440 numbers of 4 bytes, of which each of two ranks sends half twice, at 1.25 MB/s; steps of 0.5 s.

    By TCP a frame of 1538 bytes on the wire holds 1448; how synchronous gradients are sent is not known.
    """
    found = planned(APART, *SLOW).apart
    assert found is not None
    sent_s = 525_440 * 4 / 1.25e6
    exchange_s = sent_s * 1538 / 1448
    assert found.rank_bytes == 525_440 * 4 and found.exchange_s == pytest.approx(exchange_s)
    assert found.efficiency == pytest.approx(5.0 / (5.0 + exchange_s))
    assert found.even_with_one_group == pytest.approx(exchange_s / 0.5), "one group needs 1 s for the batch of two"
    assert found.synchronous_step_s == pytest.approx(0.5 + sent_s), "gradients, and new weights, half each"


@pytest.mark.parametrize(("compress", "size"), [("bf16", 2), ("int8", 1 + 4 / 256)])
def test_what_is_compressed_is_smaller_and_what_overlaps_is_hidden(compress: str, size: float) -> None:
    """Of 32 merges four are evaluated (the last one too), and cannot be hidden."""
    words = (f"recipe.local_sgd.compress={compress}", "recipe.local_sgd.overlap_steps=1", *SLOW)
    found = planned(APART, *words).apart
    assert found is not None and found.rank_bytes == pytest.approx(525_440 * size)
    exchange_s = 525_440 * size / 1.25e6 * 1538 / 1448
    stopped_s = 4 * exchange_s + 28 * max(0.0, exchange_s - 0.5)
    assert found.efficiency == pytest.approx(160 / (160 + stopped_s))


def test_the_plan_says_what_it_is_worth_and_what_is_missing() -> None:
    said = dict(rows(planned(APART, *SLOW, "recipe.local_sgd.every_steps=2", "recipe.eval_every_samples=1600")))
    assert said["efficiency apart"].startswith("35.9 % estimated: inner steps of 0.5 s, a merge of 1.79 s")
    assert "faster than one group alone above H = 3.57 (X: not with this H)" in said["worth it"]
    assert dict(rows(planned(APART)))["efficiency apart"] == "not estimated: cluster.network_gbs is not known"
    unknown = dict(rows(planned(APART, SLOW[0])))["efficiency apart"]
    assert unknown == "not estimated: a step time (recipe.local_sgd.step_time_s) is not known"


@pytest.mark.parametrize("through", [(), ("hydra.verbose=false",)])
@pytest.mark.parametrize("given", [("every_steps=10", "compress=int8"), ("={every_steps: 10, compress: int8}",)])
def test_any_training_task_trains_apart_when_it_is_told_how_often_to_merge(
    given: tuple[str, ...], through: tuple[str, ...]
) -> None:
    """By keys or in braces; composed by Hydra alone, and from what was kept."""
    words = [f"recipe.local_sgd{'' if word[0] == '=' else '.'}{word}" for word in given]
    plan, config_yaml = compose.for_run(["task=pretrain_tiny", "parallel.groups=2", *words, *through])
    assert isinstance(plan, TrainingPlan) and plan.world.groups == 2
    assert plan.config.recipe.local_sgd == LocalSgd(every_steps=10, compress=Compress.int8)
    assert compose.read(config_yaml).recipe.local_sgd == plan.config.recipe.local_sgd


def test_a_task_that_is_not_told_so_trains_together() -> None:
    plan, config_yaml = compose.for_run(["task=pretrain_tiny"])
    assert isinstance(plan, TrainingPlan) and plan.config.recipe.averaging is None
    assert "local_sgd" not in plan_kinds.dumps(plan)
    assert compose.read(config_yaml).recipe.averaging is None


REFUSED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "groups without local SGD": (("task=pretrain_tiny", "parallel.groups=2"), "2 groups", "pretrain_tiny_apart"),
    "groups of kernels": (("task=gemm", "cluster=dgx1", "parallel.groups=2"), "2 groups", "leave parallel.groups out"),
    "groups, and how to name it": (("task=pretrain_tiny", "parallel.groups=2"), "2 groups", "every_steps=100"),
    "no interval": (("task=pretrain_tiny", "recipe.local_sgd.outer_lr=0.7"), "outer_lr is set", "every_steps=100"),
    "no such key": (("task=pretrain_tiny", "recipe.local_sgd={every_step: 1}"), "'every_step'", "every_steps?"),
    "local SGD without groups": ((APART, "parallel.groups=null"), "no groups", "parallel.groups=2"),
    "three groups": ((APART, "parallel.groups=3"), "are not 3 groups", "divide"),
    "an odd batch": ((APART, "recipe.global_batch_size=15"), "no equal shares", "a multiple of 2"),
    "between merges": ((APART, "recipe.local_sgd.every_steps=7"), "an evaluation after step 100", "112"),
    "no steps": ((APART, "recipe.local_sgd.every_steps=0"), "a merge every 0 steps", "1 or more"),
    "overlap": ((APART, "recipe.local_sgd.overlap_steps=10"), "overlaps with 10 steps", "use 0 to 9"),
    "rate": ((APART, "recipe.local_sgd.outer_lr=0"), "0 is not above 0", "0.7"),
    "momentum": ((APART, "recipe.local_sgd.outer_momentum=1"), "1 is not in [0, 1)", "0.9"),
    "mean": ((APART, "recipe.local_sgd.outer_momentum=0.9"), "has no outer step", "average=nesterov"),
    "limit": ((APART, "recipe.local_sgd.time_limit_s=0"), "0.0 is not above 0", "seconds above 0"),
    "restarts": ((APART, "recipe.local_sgd.restarts=-1"), "-1 restarts", "0 or more"),
    "elsewhere": ((APART, "cluster=dgx2", "recipe.local_sgd.restarts=1"), "only on this machine", "resume"),
    "engine": ((APART, "engine=huggingface"), "engine=huggingface knows no groups", "engine=megatron"),
    "target": ((APART, "task.training.target_eval_loss=1"), "the task has a target", "target_eval_loss=null"),
    "whole optimizer": ((APART, "parallel.distributed_optimizer=false"), "shards", "distributed_optimizer=true"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_apart_is_refused(case: str) -> None:
    overrides, what, fix = REFUSED[case]
    with pytest.raises(ConfigError) as refused:
        compose.compose(list(overrides))
    error: Any = refused.value
    assert what in error.what and fix in error.fix, error
