"""Plans of mixtures of experts: counts of parameters, operations and memory, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch

from bench.contract import families, plan_kinds
from bench.contract.model import Model
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError
from bench.planning import compose
from bench.planning.estimates import flops, memory, parameters
from bench.planning.parallelism import split
from bench.report import training_plan

PRETRAIN = (
    *("task=pretrain_8b", "cluster=dgxh200", "model.weights=random", "recipe.global_batch_size=64"),
    *("recipe.moments=fp32", "data.train_rows=1024", "parallel.tp=1", "parallel.cp=1", "parallel.sp=false"),
)
TINY = ("task=pretrain_tiny", "model=tiny_moe", "cluster.ranks_per_node=2")
LORA_TINY = ("task=lora_tiny", "model=tiny_moe", "cluster.ranks_per_node=2")


def model_of(name: str) -> Model:
    return compose.unplanned([f"model={name}"]).model


SHIPPED = {
    "mixtral_8x7b": 12_879_925_248,
    "qwen3_30b_a3b": 3_353_032_704,
    "gpt_oss_20b": 4_187_440_704,
    "gpt_oss_120b": 5_711_982_912,
}
"""Active parameters by hand: all but those of the experts that a token is not sent to.

Mixtral: 46,702,792,704 - 32 layers x 6 experts x 3 x 4096 x 14336. Qwen3-30B-A3B: 30,532,122,624 - 48 x 120 x 3 x 2048
x 768. gpt-oss-20b, whose experts have biases: 20,914,757,184 - 24 x 28 x (3 x 2880 x 2880 + 3 x 2880). gpt-oss-120b:
116,829,156,672 - 36 x 124 x (the same). The published numbers are 12.9B, 3.3B, 3.6B and 5.1B; the last two do not count
the embedding, 201088 x 2880.
"""


@pytest.mark.long
@pytest.mark.parametrize("name", SHIPPED)
def test_parameters_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = model_of(name)
    family = families.of_model(model)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**family.config_of(model)))
    assert parameters.parameters(model) == theirs.num_parameters()
    assert sum(torch.Size(shape).numel() for shape in family.tensors(model).values()) == theirs.num_parameters()
    assert parameters.active_parameters(model) == SHIPPED[name]


@pytest.mark.parametrize("name", [*SHIPPED, "tiny_moe"])
def test_config_json_of_transformers_gives_the_model(name: str) -> None:
    """As transformers writes it, and with its defaults for the keys that the family does not write."""
    from transformers import AutoConfig

    model = model_of(name)
    theirs = AutoConfig.for_model(**families.of_model(model).config_of(model)).to_dict()
    read = families.model_of(theirs, name=model.name, source=model.source, where="config.json")
    assert dataclasses.replace(read, head_dim=read.head_size) == dataclasses.replace(model, head_dim=model.head_size)


def test_operations_count_the_experts_of_a_token_and_the_router() -> None:
    """Mixtral in rows of 4096 tokens, by hand: 6 per active weight but the embedding, and attention."""
    model = model_of("mixtral_8x7b")
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 3 * 4096 * 14336 + 8 * 4096
    per_token = 6 * (32 * layer + 32000 * 4096) + 6 * 4096 * 4096 * 32
    assert flops.tflop_per_sample(model, None, seq_length=4096) == pytest.approx(per_token * 4096 / 1e12, rel=1e-12)


@pytest.mark.long
def test_a_rank_holds_its_experts_and_states_of_all_ranks_together() -> None:
    """With ep 8 an eighth of Mixtral's experts; dp ranks share the optimizer's states of all experts in any case."""
    config = compose.unplanned([*PRETRAIN, "model=mixtral_8x7b"])
    worlds = {}
    for ep in (1, 8):
        config.parallel.ep = ep
        worlds[ep] = memory.estimate(config, split(config, tp=1, pp=1, cp=1, sp=False), memory.EVERYTHING)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert worlds[1].rank_parameters - worlds[8].rank_parameters == experts * 7 // 8
    assert worlds[1].parameters == worlds[8].parameters == 46_702_792_704
    for part, size in {"base_weights_gib": 2, "gradients_gib": 4}.items():
        assert (getattr(worlds[1], part) - getattr(worlds[8], part)) * 2**30 == size * experts * 7 / 8
    assert worlds[1].optimizer_gib == worlds[8].optimizer_gib == 46_702_792_704 * 12 / 8 / 2**30


def test_plan_shows_experts_and_keeps_plans_without_them_unchanged() -> None:
    plan = compose.compose([*TINY, "parallel.ep=2"])
    assert isinstance(plan, TrainingPlan)
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan
    rows = dict(training_plan.plan_rows(plan))
    assert "362,048 parameters (214,592 per token)" in rows["model"]
    assert rows["experts"].startswith("4 per layer, 2 per token, 2 on each rank; megatron-core's MoE layer, all-gather")
    assert ", ep 2" in rows["ranks"] and "mixture of experts" in rows["step time"]
    assert '"ep"' not in plan_kinds.dumps(compose.compose(["task=pretrain_tiny"]))


REFUSED = {
    "no experts": (("task=pretrain_tiny", "cluster.ranks_per_node=2", "parallel.ep=2"), "tiny has no experts"),
    "not a divisor of the experts": (
        (*TINY, "parallel.ep=3", "cluster.ranks_per_node=3", "recipe.global_batch_size=12"),
        "ep 3 does not divide the 4 experts of tiny_moe",
    ),
    "not a divisor of the ranks": (
        (*TINY, "parallel.ep=4"),
        "ep is 4, but must divide dp x cp = 2 x 1 = 2",
    ),
    "replicated optimizer": (
        (*TINY, "parallel.ep=2", "parallel.distributed_optimizer=false"),
        "need the distributed optimizer",
    ),
    "tp without sp": (
        (*TINY, "parallel.tp=2", "parallel.sp=false"),
        "tensor parallelism of a model with experts needs sequence parallelism",
    ),
    "fp8": ((*TINY, "precision=fp8"), "trains experts in FP32 and BF16"),
    "lora fp8": ((*LORA_TINY, "precision=fp8"), "trains experts in FP32 and BF16"),
    "qlora": ((*LORA_TINY, "task.training.trains=qlora", "precision=bf16"), "need a model without experts"),
    "offloaded activations": ((*TINY, "recipe.offload_activations=true"), "needs runstop's own layers"),
    "one normalised expert": ((*TINY, "model.experts.experts_per_token=1"), "the router has no gradient"),
    "too many experts": ((*TINY, "model.experts.experts_per_token=5"), "experts_per_token is 5, but the model has"),
    "negative loss": ((*TINY, "model.experts.aux_loss_coef=-1"), "must be a finite number of 0 or more"),
    "generation": (("task=generate_tiny", "model=tiny_moe"), "model.experts.num_experts is 4"),
    "local sgd": (
        ("task=pretrain_tiny_local_sgd", "model=tiny_moe", "cluster.ranks_per_node=4", "parallel.ep=2"),
        "local SGD averages whole models",
    ),
    "gpt-oss": (
        (*PRETRAIN, "model=gpt_oss_20b"),
        "attention sinks, sliding windows, biases of router and experts and a clamped SwiGLU",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_layer_does_not_support_is_refused(why: str) -> None:
    overrides, message = REFUSED[why]
    with pytest.raises(ConfigError) as refused:
        compose.compose(overrides)
    assert message in refused.value.what
    assert refused.value.where and refused.value.fix


def test_quantised_weights_are_refused_but_those_of_gpt_oss(tmp_path: Path) -> None:
    for name, method in (("mixtral_8x7b", "mxfp4"), ("gpt_oss_20b", "gptq")):
        model = model_of(name)
        values = families.of_model(model).config_of(model) | {"quantization_config": {"quant_method": method}}
        with pytest.raises(ConfigError, match=f"quantised .{method}"):
            families.check(values, model, where=str(tmp_path))
    values["quantization_config"] = {"quant_method": "mxfp4"}
    families.check(values, model, where=str(tmp_path))


@pytest.mark.long
def test_a_server_of_gpt_oss_is_planned() -> None:
    """The server has its own layers, whatever the engine."""
    plan = compose.compose(["task=serve_7b", "model=gpt_oss_20b", "model.weights=random", "cluster=dgxh200"])
    assert plan.estimated_memory_gib[0] > 20_914_757_184 * 2 / 2**30
