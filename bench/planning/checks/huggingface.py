"""Refuse what engine=huggingface cannot do, before anything starts; each message says what, where, and the fix."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.contract.engine import MOST_ZERO_STAGE, Attention, Bf16, HuggingFace, Strategy
from bench.contract.layers import differs_from_llama
from bench.contract.model import Activation, Norm, Position
from bench.contract.schema import Config, Device, EngineName, Precision
from bench.contract.training import MomentPrecision, Trains
from bench.errors import ConfigError
from bench.mlperf import closed_division

BLOCK = "engine.huggingface"
FSDP = (Strategy.fsdp2, Strategy.fsdp2_hybrid)
BF16_WAYS = {
    Strategy.ddp: (Bf16.autocast, Bf16.pure),
    Strategy.fsdp2: (Bf16.autocast, Bf16.pure),
    Strategy.fsdp2_hybrid: (Bf16.autocast, Bf16.pure),
    Strategy.deepspeed: (Bf16.deepspeed,),
    Strategy.balanced: (Bf16.autocast, Bf16.pure),
}
"""What each strategy can make of BF16: FP32 master weights beside weights in BF16 are DeepSpeed's."""
COMPILING_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Refused:
    """Something that is asked of the engine, and that it cannot do."""

    is_asked: bool
    what: str
    where: str
    fix: str


def check(config: Config) -> None:
    """Raise ConfigError on the first thing that the config's engine cannot do."""
    _check_block(config)
    hf = config.huggingface
    if hf is None:
        return
    for refused in (
        *_model(config),
        *_layout(config, hf),
        *_recipe(config, hf),
        *_states(config, hf),
        *_precision(config, hf),
        *_four_bits(config, hf),
    ):
        if refused.is_asked:
            raise ConfigError(refused.what, where=refused.where, fix=refused.fix)


def smaller(hf: HuggingFace) -> dict[str, str]:
    """Return where a config says how much memory it takes, and what makes that less."""
    deeper = "" if hf.is_sharded else f"shard by {BLOCK}.strategy=fsdp2 or deepspeed with zero_stage=3, "
    return {
        "where": f"{BLOCK}, recipe.micro_batch_size, recipe.recompute",
        "fix": f"set recipe.recompute=full, {deeper}offload (offload_optimizer, offload_parameters, "
        "offload_activations), lower recipe.micro_batch_size, or use more GPUs",
    }


def _check_block(config: Config) -> None:
    name, block = config.engine.name, config.engine.huggingface
    if (name is EngineName.huggingface) != (block is not None):
        raise ConfigError(
            f"engine.name is {name.name}, and {BLOCK} is {'missing' if block is None else 'given'}",
            where=f"engine.name, {BLOCK}",
            fix=f"choose engine={name.name} as a whole",
        )


def _model(config: Config) -> Iterator[Refused]:
    unmet, trains_all = differs_from_llama(config.model), config.training.trains is Trains.all
    differing = ", ".join(f"{key} is {value}" for key, value in unmet.items())
    yield Refused(
        bool(unmet) and not trains_all,
        f"engine=huggingface puts adapters on a Llama, and {differing}",
        f"task.training.trains, {', '.join(unmet)}",
        "train all weights (task.training.trains=all task.training.lora=null), or choose engine=megatron",
    )
    m = config.model
    is_gpt2 = (m.norm, m.activation, m.position, m.bias) == (Norm.LayerNorm, Activation.gelu, Position.learned, True)
    yield Refused(
        bool(unmet) and not (is_gpt2 and m.num_query_groups == m.num_attention_heads),
        f"engine=huggingface trains transformers' Llama and GPT-2, and {m.name} is neither: {differing}",
        ", ".join(unmet),
        "choose a model of either kind, or engine=megatron",
    )
    yield Refused(
        not closed_division.deviations(config),
        "this run would be one of MLPerf's closed division, and only engine=megatron was checked against its rules",
        "engine, task",
        "set task.submittable=false, or engine=megatron",
    )


def _layout(config: Config, hf: HuggingFace) -> Iterator[Refused]:
    p, num_ranks = config.parallel, config.cluster.num_nodes * config.cluster.ranks_per_node
    sizes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "vpp": p.vpp}
    split = [f"{axis} {size}" for axis, size in sizes.items() if size is not None and size > 1]
    split += ["sp"] if p.sp else []
    yield Refused(
        bool(split),
        f"{', '.join(split)}: engine=huggingface splits no layer, row or pipeline; all of its ranks are data parallel",
        ", ".join(f"parallel.{one.split()[0]}" for one in split),
        f"leave them at 1 and shard by {BLOCK}.strategy=fsdp2 or deepspeed, or choose engine=megatron",
    )
    is_balanced = hf.strategy is Strategy.balanced
    yield Refused(
        is_balanced and num_ranks != 1,
        f"strategy=balanced is one process for all of its GPUs, and this cluster has {num_ranks} ranks",
        "cluster.num_nodes, cluster.ranks_per_node",
        f"set cluster.num_nodes=1, cluster.ranks_per_node=1 and {BLOCK}.num_gpus={max(hf.num_gpus, num_ranks)}",
    )
    yield Refused(
        hf.num_gpus != 1 and (not is_balanced or hf.num_gpus < 1),
        f"num_gpus is {hf.num_gpus} with strategy={hf.strategy.name}: each of its ranks has one GPU",
        f"{BLOCK}.num_gpus",
        f"set {BLOCK}.num_gpus=1, or strategy=balanced with 1 or more",
    )
    yield Refused(
        hf.num_gpus > 1 and config.cluster.device is Device.cpu,
        f"a device map over {hf.num_gpus} GPUs, and this cluster computes on CPUs",
        f"{BLOCK}.num_gpus, cluster.device",
        f"set {BLOCK}.num_gpus=1",
    )


def _recipe(config: Config, hf: HuggingFace) -> Iterator[Refused]:
    recipe = config.training_recipe
    yield Refused(
        hf.compile and recipe.warmup_iterations < COMPILING_ITERATIONS,
        f"compile has a warm-up of {recipe.warmup_iterations}: the first iteration compiles, and what that takes is "
        "told from the last one",
        f"{BLOCK}.compile, recipe.warmup_iterations",
        f"set recipe.warmup_iterations to {COMPILING_ITERATIONS} or more",
    )
    yield Refused(
        recipe.moments is MomentPrecision.bf16,
        "recipe.moments=bf16 rounds stochastically, which engine=huggingface cannot",
        "recipe.moments",
        f"set recipe.moments=fp32; {BLOCK}.bf16=pure then has weights and moments in BF16, rounded to nearest",
    )
    yield Refused(
        recipe.offload_moments,
        "recipe.offload_moments is engine=megatron's",
        "recipe.offload_moments",
        f"set it to false, and {BLOCK}.offload_optimizer=true with strategy=deepspeed",
    )
    yield Refused(
        recipe.offload_activations,
        "recipe.offload_activations is engine=megatron's",
        "recipe.offload_activations",
        f"set it to false, and {BLOCK}.offload_activations=true",
    )


def _states(config: Config, hf: HuggingFace) -> Iterator[Refused]:
    strategy, stage = hf.strategy, hf.zero_stage
    is_deepspeed = strategy is Strategy.deepspeed
    yield Refused(
        not 0 <= stage <= MOST_ZERO_STAGE,
        f"ZeRO has stages 0 to {MOST_ZERO_STAGE}, not {stage}",
        f"{BLOCK}.zero_stage",
        f"use one of 0 to {MOST_ZERO_STAGE}",
    )
    yield Refused(
        stage > 0 and not is_deepspeed,
        f"zero_stage is {stage}, and strategy={strategy.name} is not DeepSpeed's",
        f"{BLOCK}.zero_stage, {BLOCK}.strategy",
        f"set {BLOCK}.strategy=deepspeed, or zero_stage=0",
    )
    yield Refused(
        hf.deepspeed_json is not None and not is_deepspeed,
        f"a file of DeepSpeed's settings, and strategy={strategy.name} reads none",
        f"{BLOCK}.deepspeed_json, {BLOCK}.strategy",
        f"set {BLOCK}.strategy=deepspeed, or deepspeed_json=null",
    )
    yield Refused(
        hf.offload_optimizer and not (is_deepspeed and stage),
        "only DeepSpeed's stages 1 to 3 offload optimizer states alone",
        f"{BLOCK}.offload_optimizer, {BLOCK}.zero_stage",
        f"set {BLOCK}.strategy=deepspeed and zero_stage=1 to 3; with fsdp2, offload_parameters=true moves all states",
    )
    yield Refused(
        hf.offload_parameters and not hf.is_sharded,
        f"weights are offloaded where they are sharded, and strategy={strategy.name}"
        f"{f' of stage {stage}' if is_deepspeed else ''} holds all of them",
        f"{BLOCK}.offload_parameters, {BLOCK}.strategy",
        f"set {BLOCK}.strategy=fsdp2, or deepspeed with zero_stage=3",
    )


def _precision(config: Config, hf: HuggingFace) -> Iterator[Refused]:
    is_cpu, precision = config.cluster.device is Device.cpu, config.precision
    yield Refused(
        precision is Precision.fp8,
        "engine=huggingface computes in FP32 and BF16, not in FP8",
        "precision",
        "set precision=bf16, or engine=megatron",
    )
    ways = BF16_WAYS[hf.strategy]
    yield Refused(
        hf.bf16 is not None and precision is not Precision.bf16,
        f"{BLOCK}.bf16 is {hf.bf16_mode.name}, and precision is {precision.name}",
        f"{BLOCK}.bf16, precision",
        f"set precision=bf16, or {BLOCK}.bf16=null",
    )
    yield Refused(
        hf.bf16_mode not in ways,
        f"strategy={hf.strategy.name} cannot do bf16={hf.bf16_mode.name}: FP32 master weights beside weights in "
        "BF16 are DeepSpeed's, and DeepSpeed's only way here",
        f"{BLOCK}.bf16, {BLOCK}.strategy",
        f"use one of {', '.join(way.name for way in ways)}, or null",
    )
    is_flash = hf.attention is Attention.flash_attention_2
    yield Refused(
        is_flash and is_cpu,
        "flash_attention_2 runs on GPUs, and this cluster computes on CPUs",
        f"{BLOCK}.attention, cluster.device",
        f"set {BLOCK}.attention=sdpa",
    )
    yield Refused(
        is_flash and precision is not Precision.bf16,
        f"flash_attention_2 computes in BF16, and precision is {precision.name}",
        f"{BLOCK}.attention, precision",
        f"set precision=bf16, or {BLOCK}.attention=sdpa",
    )


def _four_bits(config: Config, hf: HuggingFace) -> Iterator[Refused]:
    """A 4-bit base is not sharded: FSDP2 leaves bitsandbytes' weights whole on each rank.

    Source: Accelerate 1.15.0, utils/fsdp_utils.py, fsdp2_prepare_model (ignored_params).
    """
    is_qlora = config.training.trains is Trains.qlora
    yield Refused(
        is_qlora and hf.is_sharded,
        f"a 4-bit base is not sharded, and strategy={hf.strategy.name}"
        f"{f' of stage {hf.zero_stage}' if hf.zero_stage else ''} shards weights",
        f"{BLOCK}.strategy, task.training.trains",
        f"set {BLOCK}.strategy=ddp, or deepspeed with zero_stage=0 to 2; or task.training.trains=lora",
    )
    yield Refused(
        is_qlora and config.precision is not Precision.bf16,
        f"trains is qlora and precision is {config.precision.name}: a 4-bit base is computed with in BF16",
        "precision, task.training.trains",
        "set precision=bf16, or task.training.trains=lora",
    )
