"""Which transformer layer computes a config: the planner counts its bytes and kernels, and the engine builds it."""

from enum import Enum

from bench.contract.model import Activation, Model, Norm, Position
from bench.contract.schema import Config, Precision
from bench.contract.training import Trains


class Layer(Enum):
    """The layers of the megatron engine, and of NeMo."""

    megatron = "megatron"
    """megatron-core's own, with adapters beside its linears; NeMo has no others."""
    frozen = "frozen"
    """Hand-written, for Llama under adapters: the base is frozen, in FP8, BF16 or 4 bits."""
    trained = "trained"
    """Hand-written, for whole-model training; weight gradients are added to the FP32 buffers by the GEMMs."""


def layer_of(config: Config) -> Layer:
    """Return the layer that a config is computed with."""
    if config.nemo is not None:
        return Layer.megatron
    if config.training.trains is Trains.all:
        return Layer.trained
    is_fused = config.precision is not Precision.fp32 and not differs_from_llama(config.model)
    return Layer.frozen if is_fused else Layer.megatron


FP8_HEAD_VOCABULARY = 100_000
"""Entries of a vocabulary from which on a frozen head is computed in FP8: with 128,256 it takes 8 % of an 8B step in
BF16. Llama-2's 32,000 stay in BF16, and with them the steps of MLPerf's LoRA benchmark as they are."""
FP8_HEAD_MULTIPLE = 128
"""FP8 GEMMs take multiples of 16, on each of up to 8 TP ranks."""


def has_fp8_head(config: Config) -> bool:
    """Return whether training computes logits, and the gradient of the head's input, in FP8; evaluations do not."""
    size, is_tied = config.model.vocab_size, config.model.tied_embeddings
    is_large = size >= FP8_HEAD_VOCABULARY and size % FP8_HEAD_MULTIPLE == 0 and not is_tied
    return is_large and config.precision is Precision.fp8 and layer_of(config) is Layer.frozen


LLAMA = {"norm": Norm.RMSNorm, "activation": Activation.swiglu, "position": Position.rope, "bias": False}
"""Of a model: what the frozen layer computes."""


def differs_from_llama(model: Model) -> dict[str, str]:
    """Return the keys, and their values, in which a model differs from the Llama that the frozen layer computes."""
    unmet = {key: getattr(model, key) for key, value in LLAMA.items() if getattr(model, key) != value}
    return {f"model.{key}": value.name if isinstance(value, Enum) else str(value) for key, value in unmet.items()}
