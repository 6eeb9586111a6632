"""Which transformer layer computes a config: the planner counts its bytes and kernels, and the engine builds it."""

from enum import Enum

from bench.contract.schema import Config, Precision
from bench.contract.task import Activation, Model, Norm, Position, Trains


class Layer(Enum):
    """The layers of the megatron engine."""

    megatron = "megatron"
    """megatron-core's own, with adapters beside its linears."""
    frozen = "frozen"
    """Hand-written, for Llama under adapters: the base is frozen, in FP8, BF16 or 4 bits."""
    trained = "trained"
    """Hand-written, for whole-model training; weight gradients are added to the FP32 buffers by the GEMMs."""


def layer_of(config: Config) -> Layer:
    """Return the layer that a config is computed with."""
    if config.training.trains is Trains.all:
        return Layer.trained
    is_fused = config.precision is not Precision.fp32 and not differs_from_llama(config.model)
    return Layer.frozen if is_fused else Layer.megatron


def differs_from_llama(model: Model) -> dict[str, str]:
    """Return the keys, and their values, in which a model differs from the Llama that the frozen layer computes."""
    met = {
        "model.norm": (model.norm.name, model.norm is Norm.RMSNorm),
        "model.activation": (model.activation.name, model.activation is Activation.swiglu),
        "model.position": (model.position.name, model.position is Position.rope),
        "model.bias": (str(model.bias), not model.bias),
    }
    return {key: value for key, (value, is_met) in met.items() if not is_met}
