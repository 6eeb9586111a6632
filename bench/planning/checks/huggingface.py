"""Checks of a training task with engine=huggingface: refuse what the engine does not support."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.contract.described_model import Described
from bench.contract.engine import MOST_ZERO_STAGE, Attention, Bf16, HuggingFace, Strategy
from bench.contract.layers import differs_from_llama
from bench.contract.model import Activation, Norm, Position
from bench.contract.schema import Config, Device, EngineName, Precision
from bench.contract.training import MomentPrecision, Recompute, Trains
from bench.errors import ConfigError
from bench.mlperf import closed_division
from bench.planning import engine_block
from bench.texts import with_verb

BLOCK = "engine.huggingface"
FSDP = (Strategy.fsdp2, Strategy.fsdp2_hybrid)
BF16_WAYS = {
    Strategy.ddp: (Bf16.autocast, Bf16.pure),
    Strategy.fsdp2: (Bf16.autocast, Bf16.pure),
    Strategy.fsdp2_hybrid: (Bf16.autocast, Bf16.pure),
    Strategy.deepspeed: (Bf16.deepspeed, Bf16.pure),
    Strategy.balanced: (Bf16.autocast, Bf16.pure),
}
"""The values of engine.huggingface.bf16 per strategy: only DeepSpeed keeps FP32 master weights of BF16 weights.

DeepSpeed keeps BF16 master weights with ZeRO stages 1 to 3 only. Source: DeepSpeed 0.19.8, runtime/config.py.
"""
COMPILING_ITERATIONS = 2


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A setting that the engine does not support."""

    is_set: bool
    what: str
    where: str
    fix: str


def check(config: Config) -> None:
    """Raise ConfigError for the first setting that the engine does not support."""
    engine_block.check(config, EngineName.huggingface)
    hf = config.huggingface
    if hf is None:
        return
    for unsupported in (
        *_model(config),
        *_layout(config, hf),
        *_recipe(config, hf),
        *_states(config, hf),
        *_precision(config, hf),
        *_four_bits(config, hf),
    ):
        if unsupported.is_set:
            raise ConfigError(unsupported.what, where=unsupported.where, fix=unsupported.fix)


def smaller(hf: HuggingFace) -> dict[str, str]:
    """Return the config keys that decide the memory, and how to reduce it."""
    sharding = "" if hf.is_sharded else f"shard with {BLOCK}.strategy=fsdp2 or deepspeed with zero_stage=3, "
    return {
        "where": f"{BLOCK}, recipe.micro_batch_size, recipe.recompute",
        "fix": f"set recipe.recompute=full, or lower recipe.micro_batch_size; if this is not enough, {sharding}offload "
        "(offload_optimizer, offload_parameters, offload_activations), or use more GPUs",
    }


def _model(config: Config) -> Iterator[Unsupported]:
    yield Unsupported(
        not closed_division.deviations(config),
        "this run belongs to MLPerf's closed division, for which only engine=megatron is verified",
        "engine, task",
        "set task.submittable=false, or engine=megatron",
    )
    if config.model.described is not None:
        yield from _described(config, config.model.described)
        return
    unmet, trains_all = differs_from_llama(config.model), config.training.trains is Trains.all
    differing = ", ".join(f"{key} is {value}" for key, value in unmet.items())
    yield Unsupported(
        bool(unmet) and not trains_all,
        f"engine=huggingface supports adapters only on Llama models, but {differing}",
        f"task.training.trains, {', '.join(unmet)}",
        "train all weights (set task.training.trains=all task.training.lora=null), or choose engine=megatron",
    )
    m = config.model
    is_gpt2 = (m.norm, m.activation, m.position, m.bias) == (Norm.LayerNorm, Activation.gelu, Position.learned, True)
    yield Unsupported(
        bool(unmet) and not (is_gpt2 and m.num_query_groups == m.num_attention_heads),
        f"engine=huggingface supports only Llama and GPT-2, but {m.name} is different: {differing}",
        ", ".join(unmet),
        "choose a Llama or GPT-2 model, or engine=megatron",
    )


def _described(config: Config, described: Described) -> Iterator[Unsupported]:
    """Yield the limits of a model that transformers describes."""
    hf = config.huggingface
    assert hf is not None
    yield Unsupported(*attention_of(hf.attention, described))
    may_recompute = config.training_recipe.recompute is not Recompute.none
    recomputes = may_recompute if hf.activation_checkpointing is None else hf.activation_checkpointing
    yield Unsupported(
        recomputes and not described.can_recompute,
        f"transformers cannot recompute the layers of {described.architecture}",
        f"recipe.recompute, {BLOCK}.activation_checkpointing",
        "set recipe.recompute=none",
    )
    known = [one.name for one in described.projections]
    unknown = [] if config.training.lora is None else set(config.training.lora.peft_modules) - set(known)
    yield Unsupported(
        bool(unknown),
        f"{described.architecture} has no linear layers named {', '.join(sorted(unknown))}",
        "task.training.lora.target_modules",
        f"set target_modules to some of {', '.join(known)}, or to linear_qkv and linear_proj (of the attention)",
    )


def attention_of(attention: Attention, described: Described) -> tuple[bool, str, str, str]:
    """Return whether a model lacks an attention implementation, the problem, its key, and the fix."""
    known = described.attention_implementations
    return (
        attention.name not in known,
        f"{attention.name} attention does not support {described.architecture}, for example its attention sinks or "
        "capped scores",
        f"{BLOCK}.attention",
        f"set {BLOCK}.attention={' or '.join(known)}",
    )


def _layout(config: Config, hf: HuggingFace) -> Iterator[Unsupported]:
    p, num_ranks = config.parallel, config.cluster.num_nodes * config.cluster.ranks_per_node
    sizes = {"tp": p.tp, "pp": p.pp, "cp": p.cp, "vpp": p.vpp}
    split = [f"{axis} {size}" for axis, size in sizes.items() if size is not None and size > 1]
    split += ["sp"] if p.sp else []
    yield Unsupported(
        bool(split),
        f"{with_verb(split, 'is', 'are')} set, but engine=huggingface supports only data parallelism",
        ", ".join(f"parallel.{one.split()[0]}" for one in split),
        f"remove these keys and shard with {BLOCK}.strategy=fsdp2 or deepspeed, or set engine=megatron",
    )
    is_balanced = hf.strategy is Strategy.balanced
    yield Unsupported(
        is_balanced and num_ranks != 1,
        f"strategy=balanced uses one process for all GPUs, but this cluster has {num_ranks} ranks",
        "cluster.num_nodes, cluster.ranks_per_node",
        f"set cluster.num_nodes=1, cluster.ranks_per_node=1 and {BLOCK}.num_gpus={max(hf.num_gpus, num_ranks)}",
    )
    yield Unsupported(
        hf.num_gpus != 1 and (not is_balanced or hf.num_gpus < 1),
        f"num_gpus is {hf.num_gpus}, but must be {'1 or more' if is_balanced else 1} with strategy={hf.strategy.name}",
        f"{BLOCK}.num_gpus",
        f"set {BLOCK}.num_gpus=1, or set strategy=balanced and num_gpus to 1 or more",
    )
    yield Unsupported(
        hf.num_gpus > 1 and config.cluster.device is Device.cpu,
        f"num_gpus is {hf.num_gpus}, but cluster.device is cpu",
        f"{BLOCK}.num_gpus, cluster.device",
        f"set {BLOCK}.num_gpus=1",
    )


def _recipe(config: Config, hf: HuggingFace) -> Iterator[Unsupported]:
    recipe = config.training_recipe
    yield Unsupported(
        hf.compile and recipe.warmup_iterations < COMPILING_ITERATIONS,
        f"compile needs at least {COMPILING_ITERATIONS} warm-up iterations, but warmup_iterations is "
        f"{recipe.warmup_iterations}: the compile time is calculated as the first iteration minus the last",
        f"{BLOCK}.compile, recipe.warmup_iterations",
        f"set recipe.warmup_iterations to {COMPILING_ITERATIONS} or more",
    )
    yield Unsupported(
        recipe.moments is MomentPrecision.bf16,
        "recipe.moments=bf16 needs stochastic rounding, which engine=huggingface does not support",
        "recipe.moments",
        f"set recipe.moments=fp32; {BLOCK}.bf16=pure also keeps weights and moments in BF16, rounded to nearest",
    )
    yield Unsupported(
        recipe.offload_moments,
        "recipe.offload_moments is only for engine=megatron",
        "recipe.offload_moments",
        f"set recipe.offload_moments=false, and {BLOCK}.offload_optimizer=true with strategy=deepspeed",
    )
    yield Unsupported(
        recipe.offload_activations,
        "recipe.offload_activations is only for engine=megatron",
        "recipe.offload_activations",
        f"set recipe.offload_activations=false, and {BLOCK}.offload_activations=true",
    )


def _states(config: Config, hf: HuggingFace) -> Iterator[Unsupported]:
    strategy, stage = hf.strategy, hf.zero_stage
    is_deepspeed = strategy is Strategy.deepspeed
    yield Unsupported(
        not 0 <= stage <= MOST_ZERO_STAGE,
        f"zero_stage is {stage}, but ZeRO has only the stages 0 to {MOST_ZERO_STAGE}",
        f"{BLOCK}.zero_stage",
        f"set {BLOCK}.zero_stage to a stage from 0 to {MOST_ZERO_STAGE}",
    )
    yield Unsupported(
        stage > 0 and not is_deepspeed,
        f"zero_stage is {stage}, which needs strategy=deepspeed, but strategy is {strategy.name}",
        f"{BLOCK}.zero_stage, {BLOCK}.strategy",
        f"set {BLOCK}.strategy=deepspeed, or zero_stage=0",
    )
    yield Unsupported(
        hf.deepspeed_json is not None and not is_deepspeed,
        f"deepspeed_json is set, which needs strategy=deepspeed, but strategy is {strategy.name}",
        f"{BLOCK}.deepspeed_json, {BLOCK}.strategy",
        f"set {BLOCK}.strategy=deepspeed, or deepspeed_json=null",
    )
    yield Unsupported(
        hf.offload_optimizer and not (is_deepspeed and stage),
        "offload_optimizer needs strategy=deepspeed with zero_stage 1 to 3, but the config has "
        f"strategy={strategy.name} with zero_stage={stage}",
        f"{BLOCK}.offload_optimizer, {BLOCK}.zero_stage",
        f"set {BLOCK}.strategy=deepspeed and zero_stage to 1, 2 or 3; or set strategy=fsdp2, and "
        "offload_parameters=true instead of offload_optimizer",
    )
    yield Unsupported(
        hf.offload_parameters and not hf.is_sharded,
        f"offload_parameters needs sharded weights, but strategy={strategy.name}"
        f"{f' with stage {stage}' if is_deepspeed else ''} does not shard the weights",
        f"{BLOCK}.offload_parameters, {BLOCK}.strategy",
        f"set {BLOCK}.strategy=fsdp2, or deepspeed with zero_stage=3",
    )


def _precision(config: Config, hf: HuggingFace) -> Iterator[Unsupported]:
    is_cpu, precision = config.cluster.device is Device.cpu, config.precision
    yield Unsupported(
        precision is Precision.fp8,
        "engine=huggingface does not support FP8",
        "precision",
        "set precision=bf16, or engine=megatron",
    )
    ways = BF16_WAYS[hf.strategy]
    yield Unsupported(
        hf.bf16 is not None and precision is not Precision.bf16,
        f"{BLOCK}.bf16 is {hf.bf16_mode.name}, but precision is {precision.name}",
        f"{BLOCK}.bf16, precision",
        f"set precision=bf16, or {BLOCK}.bf16=null",
    )
    yield Unsupported(
        hf.bf16_mode not in ways,
        f"strategy={hf.strategy.name} does not support bf16={hf.bf16_mode.name}",
        f"{BLOCK}.bf16, {BLOCK}.strategy",
        f"set {BLOCK}.bf16 to one of {', '.join(way.name for way in ways)}, or to null",
    )
    is_stage_0 = hf.strategy is Strategy.deepspeed and not hf.zero_stage
    yield Unsupported(
        hf.bf16 is Bf16.pure and is_stage_0,
        "bf16=pure with strategy=deepspeed needs ZeRO stage 1, 2 or 3, but zero_stage is 0",
        f"{BLOCK}.bf16, {BLOCK}.zero_stage",
        f"set {BLOCK}.strategy=ddp for unsharded states in BF16, or zero_stage=1, 2 or 3",
    )
    is_flash = hf.attention is Attention.flash_attention_2
    yield Unsupported(
        is_flash and is_cpu,
        "flash_attention_2 needs a GPU, but cluster.device is cpu",
        f"{BLOCK}.attention, cluster.device",
        f"set {BLOCK}.attention=sdpa",
    )
    yield Unsupported(
        is_flash and precision is not Precision.bf16,
        f"flash_attention_2 needs precision bf16, but precision is {precision.name}",
        f"{BLOCK}.attention, precision",
        f"set precision=bf16, or {BLOCK}.attention=sdpa",
    )


def _four_bits(config: Config, hf: HuggingFace) -> Iterator[Unsupported]:
    """Yield the limits of QLoRA. A sharded 4-bit base is stored in BF16 elements, the data type of the GEMMs."""
    is_qlora = config.training.trains is Trains.qlora
    yield Unsupported(
        is_qlora and config.precision is not Precision.bf16,
        f"trains=qlora needs precision bf16, but precision is {config.precision.name}",
        "precision, task.training.trains",
        "set precision=bf16, or task.training.trains=lora",
    )
