"""Checks of memory: refuse layouts that do not fit, and offloading that is not supported."""

from bench.contract.layers import Layer, layer_of
from bench.contract.plan import Memory
from bench.contract.schema import Config
from bench.contract.training import MomentPrecision, Recompute, Trains
from bench.errors import ConfigError
from bench.planning.checks import huggingface
from bench.texts import with_article


class TooLittleMemoryError(ConfigError):
    """The estimated memory of a plan exceeds the GPU's memory."""


def check(config: Config, memory: Memory) -> None:
    """Raise TooLittleMemoryError if the estimate exceeds the GPU's memory."""
    if memory.fits is not False:
        return
    gpu = config.cluster.gpu
    assert gpu is not None
    raise TooLittleMemoryError(
        f"estimated memory is {memory.total_gib:.1f} GiB per GPU, but {with_article(gpu.name)} has "
        f"{gpu.memory_gib:g} GiB; the estimate is the sum of weights "
        f"{memory.base_weights_gib + memory.adapter_weights_gib:.1f}, gradients "
        f"{memory.gradients_gib:.1f}, optimizer {memory.optimizer_gib:.1f}, activations {memory.activations_gib:.1f} "
        f"and workspace {memory.workspace_gib:.1f}",
        **(_smaller(config) if config.huggingface is None else huggingface.smaller(config.huggingface)),
    )


def _smaller(config: Config) -> dict[str, str]:
    """Return the config keys that decide the memory, and how to reduce it."""
    experts = "parallel.ep (experts), " if config.model.experts else ""
    micro = config.training_recipe.micro_batch_size
    smaller = "" if micro is None or micro == 1 else "lower recipe.micro_batch_size (activations), or "
    return {
        "where": "parallel.tp, parallel.pp, parallel.cp, recipe.recompute",
        "fix": f"{smaller}raise {experts}parallel.tp (weights), parallel.cp (activations) or the number of GPUs, "
        "or set recipe.recompute=full" + _smaller_states(config),
    }


def _smaller_states(config: Config) -> str:
    """Return further ways to reduce the memory of full training: other moments, or adapters."""
    if config.training.trains is not Trains.all:
        return ""
    choices = ["recipe.moments=bf16"] if config.training_recipe.moments is MomentPrecision.fp32 else []
    choices += ["recipe.offload_moments=true"] if not config.training_recipe.offload_moments else []
    return "".join(f", {choice}" for choice in choices) + ", or train adapters (a task lora_* or qlora_*)"


def check_offload(config: Config) -> None:
    """Refuse activation offloading with full recomputation, or in layers that do not support it."""
    if not config.training_recipe.offload_activations:
        return
    if config.training_recipe.recompute is Recompute.full:
        raise ConfigError(
            "recipe.offload_activations has no effect, because recipe.recompute=full stores no layer activations",
            where="recipe.offload_activations, recipe.recompute",
            fix="set recipe.recompute=fit, or recipe.offload_activations=false",
        )
    if layer_of(config) is Layer.megatron:
        raise ConfigError(
            "recipe.offload_activations needs runstop's own layers, but this run uses the layers of megatron-core",
            where="recipe.offload_activations, precision",
            fix="set recipe.offload_activations=false; or, to use runstop's own layers, train adapters of a Llama, "
            "Mistral or Qwen model with precision=bf16",
        )
