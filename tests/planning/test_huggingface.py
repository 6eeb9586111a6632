"""engine=huggingface in the plan: what it is refused, how its ranks are laid out, and what DeepSpeed is given."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.contract import plan as plans
from bench.contract import plan_kinds
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.schema import EngineName
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
    "tensor parallel": (["parallel.tp=2"], "parallel.tp", "tp 2: engine=huggingface splits no layer"),
    "pipeline": (["parallel.pp=2", "parallel.vpp=2"], "parallel.pp, parallel.vpp", "pp 2, vpp 2"),
    "FP8": (["precision=fp8"], "precision", "FP32 and BF16, not in FP8"),
    "stochastic moments": (["recipe.moments=bf16"], "recipe.moments", "rounds stochastically"),
    "our offload": (["recipe.offload_activations=true"], "recipe.offload_activations", "is engine=megatron's"),
    "compiled within the clock": (
        [f"{BLOCK}.compile=true", "recipe.warmup_iterations=1"],
        "recipe.warmup_iterations",
        "compile has a warm-up of 1",
    ),
    "a stage of DDP": ([f"{BLOCK}.zero_stage=2"], f"{BLOCK}.zero_stage", "strategy=ddp is not DeepSpeed's"),
    "stage 4": (deepspeed(4), f"{BLOCK}.zero_stage", "stages 0 to 3, not 4"),
    "a file for FSDP": (
        [f"{BLOCK}.strategy=fsdp2", f"{BLOCK}.deepspeed_json=llama31_8b"],
        f"{BLOCK}.deepspeed_json",
        "strategy=fsdp2 reads none",
    ),
    "states of FSDP": (
        [f"{BLOCK}.strategy=fsdp2", f"{BLOCK}.offload_optimizer=true"],
        f"{BLOCK}.offload_optimizer",
        "only DeepSpeed's stages 1 to 3",
    ),
    "states of stage 0": (deepspeed(0, f"{BLOCK}.offload_optimizer=true"), f"{BLOCK}.offload_optimizer", "only Deep"),
    "weights of stage 2": (
        deepspeed(2, f"{BLOCK}.offload_parameters=true"),
        f"{BLOCK}.offload_param",
        "of stage 2 holds",
    ),
    "masters of DDP": (["precision=bf16", f"{BLOCK}.bf16=deepspeed"], f"{BLOCK}.bf16", "FP32 master weights beside"),
    "pure DeepSpeed": (deepspeed(1, "precision=bf16", f"{BLOCK}.bf16=pure"), f"{BLOCK}.bf16", "cannot do bf16=pure"),
    "a way of BF16 in FP32": ([f"{BLOCK}.bf16=pure"], f"{BLOCK}.bf16, precision", "precision is fp32"),
    "flash on CPUs": ([f"{BLOCK}.attention=flash_attention_2"], f"{BLOCK}.attention", "runs on GPUs"),
    "flash in FP32": ([*ONE_H200, f"{BLOCK}.attention=flash_attention_2"], f"{BLOCK}.attention", "computes in BF16"),
    "two processes balanced": ([f"{BLOCK}.strategy=balanced"], "cluster.ranks_per_node", "has 2 ranks"),
    "GPUs of a rank": ([f"{BLOCK}.num_gpus=2"], f"{BLOCK}.num_gpus", "each of its ranks has one GPU"),
    "sharded 4-bit base": (
        ["precision=bf16", "task.training.trains=qlora", f"{BLOCK}.strategy=fsdp2"],
        "task.training.trains",
        "a 4-bit base is not sharded, and strategy=fsdp2",
    ),
    "4-bit base in stage 3": (
        deepspeed(3, "precision=bf16", "task.training.trains=qlora"),
        "task.training.trains",
        "of stage 3 shards weights",
    ),
    "adapters on a GPT": (
        ["model.norm=LayerNorm", "model.activation=gelu", "model.position=learned", "model.bias=true"],
        "task.training.trains",
        "puts adapters on a Llama",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_refused(name: str) -> None:
    words, where, what = REFUSED[name]
    config = config_of([HUGGINGFACE, "cluster.ranks_per_node=2", *words])
    with pytest.raises(ConfigError) as refused:
        make_plan.check(config)
    assert where in refused.value.where and what in refused.value.what and refused.value.fix


def test_what_it_can_do_is_not_refused() -> None:
    for words in (
        deepspeed(3, f"{BLOCK}.offload_parameters=true", f"{BLOCK}.offload_optimizer=true"),
        deepspeed(2, "precision=bf16", "task.training.trains=qlora"),
        [f"{BLOCK}.strategy=fsdp2_hybrid", f"{BLOCK}.offload_parameters=true"],
        [f"{BLOCK}.strategy=balanced", "cluster.ranks_per_node=1"],
        ["task=pretrain_gpt3_126m", "recipe.recompute=full", *EIGHT],
    ):
        make_plan.check(config_of([HUGGINGFACE, *words]))


def test_the_benchmark_of_mlperf_s_closed_division_is_ours_alone() -> None:
    with pytest.raises(ConfigError, match="closed division"):
        make_plan.check(config_of([HUGGINGFACE, "task=lora70b", "cluster=dgxh200", "precision=bf16"]))
    make_plan.check(
        config_of([HUGGINGFACE, "task=lora70b", "cluster=dgxh200", "precision=bf16", "task.submittable=false"])
    )


def test_a_block_belongs_to_the_engine_of_its_name() -> None:
    config = config_of([HUGGINGFACE])
    config.engine.name = EngineName.megatron
    with pytest.raises(ConfigError, match="engine.name is megatron, and engine.huggingface is given"):
        make_plan.check(config)


def test_a_key_below_a_missing_block_names_the_engine_that_has_it() -> None:
    with pytest.raises(ConfigError) as refused:
        compose.unplanned([f"{BLOCK}.strategy=fsdp2"])
    assert (refused.value.where, refused.value.fix) == (f"{BLOCK}.strategy", "choose engine=huggingface")


def test_all_ranks_are_data_parallel_and_no_step_time_is_made_up() -> None:
    plan = planned("task=pretrain_7b", *EIGHT, *ROWS_350, f"{BLOCK}.strategy=fsdp2")
    w = plan.world
    assert (w.dp, w.tp, w.pp, w.cp, w.sp) == (8, 1, 1, 1, False)
    assert plan.cost is None and not plan.cuda_graph
    assert plan_kinds.loads(plan_kinds.dumps(plan)) == plan


def test_without_a_model_of_the_time_a_micro_batch_that_needs_no_recomputation_is_preferred() -> None:
    plan = planned("task=pretrain_7b", *EIGHT, "model.weights=random", f"{BLOCK}.strategy=fsdp2")
    larger = planned(
        "task=pretrain_7b", *EIGHT, "model.weights=random", f"{BLOCK}.strategy=fsdp2", "recipe.recompute=full"
    )
    assert not plan.recompute.full and larger.recompute.full
    assert 1 < plan.batch.micro_batch_size < larger.batch.micro_batch_size


def test_the_engine_s_own_word_on_checkpointing_counts_over_the_recipe_s() -> None:
    words = ["task=pretrain_7b", *EIGHT, *ROWS_350, "recipe.global_batch_size=8", "recipe.recompute=full"]
    assert planned(*words).recompute.full
    assert not planned(*words, f"{BLOCK}.activation_checkpointing=false").recompute.full


def test_the_gpus_of_one_process_are_asked_for_and_counted() -> None:
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


def test_deepspeed_gets_the_document_s_file_with_everything_filled_in() -> None:
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


def test_sizes_that_a_file_leaves_open_follow_the_hidden_size_as_in_transformers() -> None:
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
        ({"zero_optimization": {"stage": 2}}, "says zero_optimization.stage 2, and the config 3"),
        ({"gradient_accumulation_steps": 4}, "says gradient_accumulation_steps 4, and the config 1"),
        ({"bf16": {"enabled": False}}, "says bf16.enabled False, and the config True"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            "says zero_optimization.offload_param cpu, and the config none",
        ),
        ({"optimizer": {"type": "Adam"}}, "has a block 'optimizer'"),
        ({"communication_data_type": "auto"}, "nothing says what communication_data_type is"),
    ],
)
def test_a_file_that_says_something_else_than_the_plan_is_refused(change: Any, what: str, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(DOCUMENT_8B | change))
    words = deepspeed(3, f"{BLOCK}.deepspeed_json={tmp_path}/own.json")
    with pytest.raises(ConfigError) as refused:
        planned(*PUBMEDQA, *words, "recipe.micro_batch_size=24", "recipe.global_batch_size=192")
    assert what in refused.value.what and refused.value.fix


@pytest.mark.parametrize(
    ("content", "what"), [("{", "is not JSON"), ("[1]", "is no JSON object"), (None, "No such file or directory")]
)
def test_a_file_that_cannot_be_read_is_refused(content: str | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=what):
        planned(*PUBMEDQA, *deepspeed(3, f"{BLOCK}.deepspeed_json={path}"), "recipe.micro_batch_size=24")


def test_the_plan_says_how_the_engine_computes() -> None:
    from bench.console import plan as sheets

    rows = dict(sheets.rows(planned("task=qlora_7b", *EIGHT, *ROWS_350, *deepspeed(2))))
    assert rows["engine"] == "huggingface: deepspeed of stage 2, sdpa attention, BF16 as deepspeed"
    assert rows["step time"] == "not estimated: there is no model of the time of engine=huggingface"
