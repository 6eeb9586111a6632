"""Choose the transformer layer of a config: the planner estimates it, and the engine builds it."""

from enum import Enum
from typing import Any

from bench.contract.model import Activation, Model, Norm, Position
from bench.contract.schema import Config, Precision
from bench.contract.training import Trains


class Layer(Enum):
    """The layers of the megatron engine, and of NeMo."""

    megatron = "megatron"
    """megatron-core's own layer, with adapters next to its linears; NeMo always uses it."""
    frozen = "frozen"
    """Our layer for Llama, Mistral and Qwen with adapters: the base is frozen, in FP8, BF16 or 4 bits."""
    trained = "trained"
    """Our layer for full training; the GEMMs add weight gradients to the FP32 buffers."""


def layer_of(config: Config) -> Layer:
    """Return the layer that the engine uses for a config."""
    if config.nemo is not None:
        return Layer.megatron
    if config.model.experts is not None:
        return Layer.megatron
    if config.training.trains is Trains.all:
        return Layer.trained
    is_fused = config.precision is not Precision.fp32 and not differs_from_llama(config.model)
    return Layer.frozen if is_fused else Layer.megatron


FP8_HEAD_VOCABULARY = 100_000
"""Minimum vocabulary size for a frozen head in FP8: in BF16, a head of 128,256 takes 8 % of an 8B step. Llama-2's
32,000 stay in BF16, so that MLPerf's LoRA benchmark is unchanged."""
FP8_HEAD_MULTIPLE = 128
"""FP8 GEMMs need multiples of 16 on each of up to 8 TP ranks."""


def has_fp8_head(config: Config) -> bool:
    """Return whether training computes logits, and the gradient of the head's input, in FP8; evaluations do not."""
    size, is_tied = config.model.vocab_size, config.model.tied_embeddings
    is_large = size >= FP8_HEAD_VOCABULARY and size % FP8_HEAD_MULTIPLE == 0 and not is_tied
    return is_large and config.precision is Precision.fp8 and layer_of(config) is Layer.frozen


def has_head_kernels(model: Model) -> bool:
    """Return whether the kernels between qkv and attention support the head size; otherwise plain torch does it."""
    return model.head_size & (model.head_size - 1) == 0


LLAMA = {"norm": Norm.RMSNorm, "activation": Activation.swiglu, "position": Position.rope, "bias": False}
"""The model settings that the frozen layer and generation need; sizes, qkv_bias and qk_norm may be any."""


def differs_from_llama(model: Model) -> dict[str, str]:
    """Return the settings, by key, that the frozen layer and generation do not support."""
    unmet: dict[str, Any] = {key: getattr(model, key) for key, value in LLAMA.items() if getattr(model, key) != value}
    if model.experts is not None:
        unmet["experts.num_experts"] = model.experts.num_experts
    return {f"model.{key}": value.name if isinstance(value, Enum) else str(value) for key, value in unmet.items()}
