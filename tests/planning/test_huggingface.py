"""engine=huggingface in the plan: what it is refused, how its ranks are laid out, and what DeepSpeed is given."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import Engine, EngineName
from bench.errors import ConfigError
from bench.planning import compose, make_plan
from tests.helpers.cached_configs import cached

HUGGINGFACE = "engine=huggingface"
BLOCK = "engine.huggingface"
ONE_H200 = ["cluster=local", "cluster.device=cuda", "cluster.ranks_per_node=1", "gpu@cluster.gpu=h200"]
EIGHT = [*ONE_H200[:2], "cluster.ranks_per_node=8", ONE_H200[3]]
ROWS_350 = ["data=rows_350", "data.train_rows=65536", "model.weights=random", "recipe.eval_every_samples=60000"]
config_of = cached(lambda words: compose.unplanned(words))


def planned(*words: str) -> TrainingPlan:
    return plan_kinds.required(
        make_plan.make(compose.as_planned(config_of([HUGGINGFACE, *words]))), plan_kinds.TrainingPlan
    )


def deepspeed(stage: int, *words: str) -> list[str]:
    return [f"{BLOCK}.strategy=deepspeed", f"{BLOCK}.zero_stage={stage}", *words]


REFUSED = {
    "tensor parallel": (
        ["parallel.tp=2"],
        "parallel.tp",
        "tp 2 is set, but engine=huggingface supports only data parallelism",
    ),
    "pipeline": (["parallel.pp=2", "parallel.vpp=2"], "parallel.pp, parallel.vpp", "pp 2 and vpp 2 are set"),
    "FP8": (["precision=fp8"], "precision", "engine=huggingface does not support FP8"),
    "stochastic moments": (
        ["recipe.moments=bf16"],
        "recipe.moments",
        "recipe.moments=bf16 needs stochastic rounding, which",
    ),
    "our offload": (
        ["recipe.offload_activations=true"],
        "recipe.offload_activations",
        "recipe.offload_activations is only for engine=megatron",
    ),
    "compiled within the clock": (
        [f"{BLOCK}.compile=true", "recipe.warmup_iterations=1"],
        "recipe.warmup_iterations",
        "compile needs at least 2 warm-up iterations, but",
    ),
    "a stage of DDP": (
        [f"{BLOCK}.zero_stage=2"],
        f"{BLOCK}.zero_stage",
        "zero_stage is 2, which needs strategy=deepspeed, but strategy is ddp",
    ),
    "stage 4": (deepspeed(4), f"{BLOCK}.zero_stage", "zero_stage is 4, but ZeRO has only the stages 0 to 3"),
    "a file for FSDP": (
        [f"{BLOCK}.strategy=fsdp2", f"{BLOCK}.deepspeed_json=llama31_8b"],
        f"{BLOCK}.deepspeed_json",
        "deepspeed_json is set, which needs strategy=deepspeed, but strategy is fsdp2",
    ),
    "states of FSDP": (
        [f"{BLOCK}.strategy=fsdp2", f"{BLOCK}.offload_optimizer=true"],
        f"{BLOCK}.offload_optimizer",
        "offload_optimizer needs strategy=deepspeed with zero_stage 1 to 3",
    ),
    "states of stage 0": (
        deepspeed(0, f"{BLOCK}.offload_optimizer=true"),
        f"{BLOCK}.offload_optimizer",
        "offload_optimizer needs strategy=deepspeed with zero_stage 1 to 3",
    ),
    "weights of stage 2": (
        deepspeed(2, f"{BLOCK}.offload_parameters=true"),
        f"{BLOCK}.offload_param",
        "offload_parameters needs sharded weights, but",
    ),
    "masters of DDP": (
        ["precision=bf16", f"{BLOCK}.bf16=deepspeed"],
        f"{BLOCK}.bf16",
        "strategy=ddp does not support bf16=deepspeed",
    ),
    "pure DeepSpeed of stage 0": (
        deepspeed(0, "precision=bf16", f"{BLOCK}.bf16=pure"),
        f"{BLOCK}.bf16, {BLOCK}.zero_stage",
        "bf16=pure with strategy=deepspeed needs ZeRO stage 1, 2 or 3, but zero_stage is 0",
    ),
    "DeepSpeed under autocast": (
        deepspeed(1, "precision=bf16", f"{BLOCK}.bf16=autocast"),
        f"{BLOCK}.bf16",
        "strategy=deepspeed does not support bf16=autocast",
    ),
    "a way of BF16 in FP32": ([f"{BLOCK}.bf16=pure"], f"{BLOCK}.bf16, precision", "precision is fp32"),
    "flash on CPUs": (
        [f"{BLOCK}.attention=flash_attention_2"],
        f"{BLOCK}.attention",
        "flash_attention_2 needs a GPU, but cluster.device is cpu",
    ),
    "flash in FP32": (
        [*ONE_H200, f"{BLOCK}.attention=flash_attention_2"],
        f"{BLOCK}.attention",
        "flash_attention_2 needs precision bf16, but precision is",
    ),
    "two processes balanced": ([f"{BLOCK}.strategy=balanced"], "cluster.ranks_per_node", "has 2 ranks"),
    "GPUs of a rank": (
        [f"{BLOCK}.num_gpus=2"],
        f"{BLOCK}.num_gpus",
        "num_gpus is 2, but must be 1 with strategy=ddp",
    ),
    "4-bit base in FP32": (
        ["task.training.trains=qlora", f"{BLOCK}.strategy=fsdp2"],
        "task.training.trains",
        "trains=qlora needs precision bf16, but precision is fp32",
    ),
    "PEFT's layers with a shared A": (
        ["task.training.lora.target_modules=[linear_qkv,gate_proj]"],
        "task.training.lora.target_modules",
        "target_modules contains gate_proj, which can have adapters only with shared_a=false",
    ),
    "adapters on no layer": (
        ["task.training.lora.target_modules=[qkv_proj]", "task.training.lora.shared_a=false"],
        "task.training.lora.target_modules",
        "target_modules contains qkv_proj, which cannot have adapters",
    ),
    "adapters on a GPT": (
        ["model.norm=LayerNorm", "model.activation=gelu", "model.position=learned", "model.bias=true"],
        "task.training.trains",
        "engine=huggingface supports adapters only on Llama models,",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_refused(name: str) -> None:
    words, where, what = REFUSED[name]
    config = config_of([HUGGINGFACE, "cluster.ranks_per_node=2", *words])
    with pytest.raises(ConfigError) as refused:
        make_plan.check(config)
    assert where in refused.value.where and what in refused.value.what and refused.value.fix


@pytest.mark.long
def test_supported_settings_are_accepted() -> None:
    for words in (
        deepspeed(3, f"{BLOCK}.offload_parameters=true", f"{BLOCK}.offload_optimizer=true"),
        deepspeed(2, "precision=bf16", "task.training.trains=qlora"),
        deepspeed(3, "precision=bf16", "task.training.trains=qlora", f"{BLOCK}.bf16=pure"),
        ["precision=bf16", "task.training.trains=qlora", f"{BLOCK}.strategy=fsdp2"],
        ["task.training.lora.target_modules=[q_proj,linear_fc1]", "task.training.lora.shared_a=false"],
        [f"{BLOCK}.strategy=fsdp2_hybrid", f"{BLOCK}.offload_parameters=true"],
        [f"{BLOCK}.strategy=balanced", "cluster.ranks_per_node=1"],
        ["task=pretrain_gpt3_126m", "recipe.recompute=full", *EIGHT],
    ):
        make_plan.check(config_of([HUGGINGFACE, *words]))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["megatron", "nemo"])
def test_separate_matrices_a_need_engine_huggingface(engine: str) -> None:
    words = [f"engine={engine}", "task=lora_7b", "cluster=dgxh200", "task.training.lora.shared_a=false"]
    with pytest.raises(ConfigError, match=f"needs engine=huggingface, but the engine is {engine}") as refused:
        make_plan.check(config_of(words))
    assert refused.value.where == "task.training.lora.shared_a, engine"


@pytest.mark.long
def test_a_70b_base_in_4_bits_is_planned_on_two_nodes_with_fsdp2() -> None:
    """The first document's own hardware: two nodes of eight H100 with 80 GB."""
    plan = planned("task=qlora_70b", "cluster=dgx2", "model.weights=random", f"{BLOCK}.strategy=fsdp2")
    assert plan.world.num_ranks == 16 and plan.memory.fits
    one = planned("task=qlora_70b", *ONE_H200, "model.weights=random", "recipe.micro_batch_size=1")
    assert plan.memory.base_weights_gib < one.memory.base_weights_gib / 10


@pytest.mark.long
def test_closed_division_needs_engine_megatron() -> None:
    with pytest.raises(ConfigError, match="closed division"):
        make_plan.check(config_of([HUGGINGFACE, "task=lora70b", "cluster=dgxh200", "precision=bf16"]))
    make_plan.check(
        config_of([HUGGINGFACE, "task=lora70b", "cluster=dgxh200", "precision=bf16", "task.submittable=false"])
    )


def test_only_the_block_of_the_chosen_engine_is_allowed() -> None:
    config = config_of([HUGGINGFACE])
    config.engine.name = EngineName.megatron
    with pytest.raises(ConfigError, match=r"engine\.name is megatron, but the block engine\.huggingface is set"):
        make_plan.check(config)
    for name in (EngineName.huggingface, EngineName.nemo, EngineName.command):
        config.engine = Engine(name=name)
        with pytest.raises(ConfigError, match=f"name is {name.value}, but the block engine.{name.value} is missing"):
            make_plan.check(config)


def test_the_error_of_a_key_below_a_null_block_names_its_engine() -> None:
    with pytest.raises(ConfigError) as refused:
        compose.unplanned([f"{BLOCK}.strategy=fsdp2"])
    assert (refused.value.where, refused.value.fix) == (f"{BLOCK}.strategy", "set engine=huggingface")


def test_all_ranks_are_data_parallel_and_step_time_is_not_estimated() -> None:
    plan = planned("task=pretrain_7b", *EIGHT, *ROWS_350, f"{BLOCK}.strategy=fsdp2")
    w = plan.world
    assert (w.dp, w.tp, w.pp, w.cp, w.sp) == (8, 1, 1, 1, False)
    assert plan.cost is None and not plan.cuda_graph
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


@pytest.mark.long
def test_without_step_times_a_micro_batch_without_recomputation_is_preferred() -> None:
    plan = planned("task=pretrain_7b", *EIGHT, "model.weights=random", f"{BLOCK}.strategy=fsdp2")
    larger = planned(
        "task=pretrain_7b", *EIGHT, "model.weights=random", f"{BLOCK}.strategy=fsdp2", "recipe.recompute=full"
    )
    assert not plan.recompute.full and larger.recompute.full
    assert 1 < plan.batch.micro_batch_size < larger.batch.micro_batch_size


def test_the_engines_activation_checkpointing_overrides_the_recipe() -> None:
    words = ["task=pretrain_7b", *EIGHT, *ROWS_350, "recipe.global_batch_size=8", "recipe.recompute=full"]
    assert planned(*words).recompute.full
    assert not planned(*words, f"{BLOCK}.activation_checkpointing=false").recompute.full


@pytest.mark.long
def test_the_gpus_of_one_process_are_requested_and_counted() -> None:
    words = ["task=finetune_7b_dolly", f"{BLOCK}.strategy=balanced", f"{BLOCK}.num_gpus=8", "model.weights=random"]
    plan = planned(*words, "cluster=dgxh200", "cluster.ranks_per_node=1")
    from bench.backends.slurm import script

    assert plan.world.num_ranks == 1 and plans.gpus_per_rank(plan.config) == 8
    lines = script.script(plan).splitlines()
    assert "#SBATCH --gpus-per-node=8" in lines and "#SBATCH --ntasks-per-node=1" in lines


DOCUMENT_8B: dict[str, Any] = {  # as the document prints it
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
PUBMEDQA = ["task=finetune_8b_pubmedqa", *EIGHT, "model.weights=random", "recipe.moments=fp32"]


@pytest.mark.long
def test_deepspeed_gets_the_document_s_file_without_auto() -> None:
    plan = planned(
        *PUBMEDQA,
        *deepspeed(3, f"{BLOCK}.deepspeed_json=llama31_8b"),
        "recipe.micro_batch_size=24",
        "recipe.global_batch_size=192",
    )
    assert plan.deepspeed == DOCUMENT_8B | {
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "train_batch_size": 192,
        "train_micro_batch_size_per_gpu": 24,
        "zero_allow_untested_optimizer": True,
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_pure_bf16_is_deepspeed_s_bf16_master_weights_and_states(stage: int) -> None:
    words = ["task=pretrain_7b", *EIGHT, *ROWS_350, *deepspeed(stage, f"{BLOCK}.bf16=pure")]
    settings = planned(*words).deepspeed
    assert settings is not None and settings["bf16"] == {
        "enabled": True,
        "bf16_master_weights_and_grads": True,
        "bf16_optimizer_states": True,
    }
    ours = planned(*words[:-1]).deepspeed
    assert ours is not None and ours["bf16"] == {"enabled": True}


@pytest.mark.long
def test_auto_sizes_follow_the_hidden_size_as_in_transformers() -> None:
    """transformers 5.23, integrations/deepspeed.py: h * h, 0.9 h * h and 10 h."""
    words = ["task=finetune_70b_pubmedqa", *EIGHT, "model.weights=random", "recipe.moments=fp32"]
    config = config_of(
        [HUGGINGFACE, *words, *deepspeed(3, f"{BLOCK}.deepspeed_json=llama31_70b"), "recipe.micro_batch_size=2"]
    )
    assert config.cluster.gpu
    config.cluster.gpu.memory_gib = 1000.0
    plan = plan_kinds.required(make_plan.make(compose.as_planned(config)), plan_kinds.TrainingPlan)
    assert plan.deepspeed is not None
    zero = plan.deepspeed["zero_optimization"]
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    assert [zero[name] for name in sizes] == [67_108_864, 60_397_977, 81_920]
    assert "auto" not in json.dumps(plan.deepspeed)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"zero_optimization": {"stage": 2}}, "sets zero_optimization.stage to 2, but the config needs 3"),
        ({"gradient_accumulation_steps": 4}, "sets gradient_accumulation_steps to 4, but the config needs 1"),
        ({"bf16": {"enabled": False}}, "sets bf16.enabled to False, but the config needs True"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "sets bf16.bf16_master_weights_and_grads to True, but the config needs False",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "sets zero_optimization.offload_param to cpu, but the config needs none",
        ),
        ({"optimizer": {"type": "Adam"}}, "has the block 'optimizer'"),
        ({"communication_data_type": "auto"}, "communication_data_type is 'auto', but runstop has no value"),
    ],
)
def test_a_deepspeed_file_that_contradicts_the_plan_is_refused(change: Any, what: str, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(DOCUMENT_8B | change))
    words = deepspeed(3, f"{BLOCK}.deepspeed_json={tmp_path}/own.json")
    with pytest.raises(ConfigError) as refused:
        planned(*PUBMEDQA, *words, "recipe.micro_batch_size=24", "recipe.global_batch_size=192")
    assert what in refused.value.what and refused.value.fix


@pytest.mark.parametrize(
    ("content", "what"), [("{", "is not JSON"), ("[1]", "is not a JSON object"), (None, "No such file or directory")]
)
def test_an_unreadable_deepspeed_file_is_refused(content: str | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=what):
        planned(*PUBMEDQA, *deepspeed(3, f"{BLOCK}.deepspeed_json={path}"), "recipe.micro_batch_size=24")


@pytest.mark.long
def test_the_plan_shows_the_engine_settings() -> None:
    from bench.console import plan as sheets

    rows = dict(sheets.rows(planned("task=qlora_7b", *EIGHT, *ROWS_350, *deepspeed(2))))
    assert rows["engine"] == "huggingface: deepspeed stage 2, sdpa attention, BF16 as deepspeed"
    assert rows["step time"] == "not estimated: no time model for engine=huggingface"
