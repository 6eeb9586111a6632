"""How many kernels a layer launches: with few tokens, a step takes as long as the host needs to launch them."""

from bench.contract.layers import Layer, layer_of
from bench.contract.plan import World
from bench.contract.schema import Config, Precision
from bench.contract.task import Trains

FROZEN_FP8 = 80
"""Of a layer with adapters, forward and backward together. Source: profiles of docs/results/2026-11-22-fp8.md."""
FROZEN_BF16 = 72
"""The same, without quantizing the rows of two gradients and two activations and transposing four weights."""
DEQUANTIZE = 8
"""With a 4-bit base: four linears, each forward and backward."""
TRAINED_BF16 = 36
"""Counted by hand from jobs/engines/megatron/trained/ops.py, not measured: 12 forward, of them 4 GEMMs and attention's;
24 backward, of them 8 GEMMs and 3 of attention."""
TRAINED_FP8 = 54
"""In FP8 three quantize, four weights are transposed, and the operands of four weight gradients, with their scales."""
BIASES = 4
"""The gradients of a layer's four biases are sums of their own."""
TP, SP, CP = 6, 10, 46
"""How many more there are with tp, sp and cp. Source: that report; collectives of tp and sp counted by hand in
jobs/engines/megatron/fp8/layer.py."""


def of_layer(config: Config, world: World) -> int:
    """Return how many kernels a layer launches, forward and backward; 0 for megatron-core's, which nobody counted."""
    layer, is_fp8 = layer_of(config), config.precision is Precision.fp8
    if layer is Layer.megatron:
        return 0
    if layer is Layer.trained:
        kernels = (TRAINED_FP8 if is_fp8 else TRAINED_BF16) + BIASES * config.model.bias
    else:
        kernels = FROZEN_FP8 if is_fp8 else FROZEN_BF16
        kernels += DEQUANTIZE * (config.training.trains is Trains.qlora)
    return kernels + TP * (world.tp > 1) + SP * world.sp + CP * (world.cp > 1)
