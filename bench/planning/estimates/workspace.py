"""Estimate the peak of temporary tensors in a pass, without activations stored for the backward pass."""

from bench.contract.layers import Layer, has_fp8_head, layer_of
from bench.contract.model import Model
from bench.contract.plan import Recomputed, World
from bench.contract.schema import Config, Precision
from bench.contract.training import Trains
from bench.planning.estimates.activations import BYTES, hidden_bytes, quantized_bytes, stores_inputs
from bench.planning.estimates.parameters import linears
from bench.planning.parallelism import tokens

HIDDEN_BYTES = 8
"""Per element of a hidden state in the running layer: gradients of residual and norm, BF16 and FP8. Assumed."""


def head_bytes(config: Config, world: World, recomputed: Recomputed) -> float:
    """Return the peak bytes of temporary tensors from the final norm to the loss and back.

    Hidden states H, p bytes per element:

    | pass     | base    | held at its peak                                                                            |
    | -------- | ------- | ------------------------------------------------------------------------------------------- |
    | forward  | frozen  | logits; the final norm's input and output, 2 H; the embedding's output, H, which            |
    |          |         | megatron-core's model refers to until it returns, unless the first layer stores it          |
    | backward | frozen  | logits, which their gradient overwrites; in FP8 that gradient is separate; the norm's       |
    |          |         | input, H; in the GEMM, without an FP8 head, the gradient of its input, H                    |
    | backward | trained | logits; the gradient of the weight in p bytes, before it is added to the FP32 one; the      |
    |          |         | gradient of the GEMM's input, H                                                             |

    In a pipeline the stage's input replaces the embedding's output (`memory`).
    """
    size, hidden, logits = BYTES[config.precision], hidden_bytes(config, world), logits_bytes(config, world)
    if config.training.lora is None:
        return logits + size * config.model.hidden_size * config.model.vocab_size / world.tp + hidden
    has_embedding = world.pp == 1 and not stores_inputs(config, recomputed)
    forward = logits + (2 + has_embedding) * hidden
    return max(forward, logits * (1 + 1 / size) + hidden) if has_fp8_head(config) else forward


def logits_bytes(config: Config, world: World) -> float:
    return BYTES[config.precision] * tokens(config, world) * config.model.vocab_size / world.tp


def weight_buffers_bytes(config: Config, world: World) -> float:
    """Return the bytes of the two buffers for weights that a GEMM cannot read as they are stored.

    FP8 GEMMs on Hopper need both operands with the summed axis last, so that weights are transposed for the backward
    pass. Weights of a 4-bit base are dequantised.
    """
    is_4_bit = config.training.trains is Trains.qlora
    if config.precision is not Precision.fp8 and not is_4_bit:
        return 0.0
    size = BYTES[config.precision] if is_4_bit else 1
    return 2 * size * max(linear.weights for linear in linears(config.model).values()) / world.tp


def layer_bytes(config: Config, world: World, recomputed: Recomputed) -> float:
    """Return the estimated peak of temporary tensors in one layer, without the stored activations.

    p bytes per element, q bytes per quantized element (1 in FP8, else p), o width of the fc1 output, w width of the qkv
    output, a width of q; all are split over tp:

    | phase                 | bytes per token                                                                        |
    | --------------------- | -------------------------------------------------------------------------------------- |
    | forward of the MLP    | output of fc1 p o, output of the activation q f                                        |
    | backward of the MLP   | gradients of the activation p f and of fc1 q o; p o more if fc1 is recomputed; for the |
    |                       | weights' gradients also the activation q f and, in FP8, transposed operands of fc1 o   |
    | backward of attention | gradients of attention p a and of qkv p w; p w more if qkv is recomputed; with cp also |
    |                       | k and v of every cp rank and their gradients, 4 p k cp                                 |

    With experts, the MLP counts once for each expert of a token. In FP8, transposed operands of h more, not split over
    tp, are in HIDDEN_BYTES. The buffers for weights are counted in `weight_buffers_bytes`.
    """
    model, size, quantized = config.model, BYTES[config.precision], quantized_bytes(config)
    fc1, qkv = linears(model)["linear_fc1"], linears(model)["linear_qkv"]
    mlp = size * model.mlp_size + (quantized + (size if recomputed.fc1_layers else 0)) * fc1.num_out
    if layer_of(config) is Layer.trained:
        mlp += quantized * model.mlp_size + (fc1.num_out if config.precision is Precision.fp8 else 0)
    mlp *= _mlps_per_token(model)
    attention = size * (model.q_size + (2 if recomputed.qkv_layers else 1) * qkv.num_out)
    if world.cp > 1:
        attention += 4 * size * model.kv_size * world.cp
    count = tokens(config, world)
    backward = max(mlp, attention) * count / world.tp + HIDDEN_BYTES * model.hidden_size * count
    return max(forward_bytes(config, world), backward)


def forward_bytes(config: Config, world: World) -> float:
    """Return the bytes of temporary tensors in the forward pass of one layer; see `layer_bytes` for the parts."""
    model, count = config.model, tokens(config, world)
    fc1 = linears(model)["linear_fc1"]
    split = BYTES[config.precision] * fc1.num_out + quantized_bytes(config) * model.mlp_size
    return (_mlps_per_token(model) * split / world.tp + HIDDEN_BYTES * model.hidden_size) * count


def _mlps_per_token(model: Model) -> int:
    return model.experts.experts_per_token if model.experts else 1
