"""Estimate the activations that one layer stores per token for its backward pass, on one rank."""

from bench.contract.layers import Layer, layer_of
from bench.contract.model import Activation, Norm, Position
from bench.contract.plan import Recomputed, World
from bench.contract.schema import Config, Precision
from bench.contract.training import Lora
from bench.planning.estimates.parameters import EXPERT_LINEARS, linears
from bench.planning.parallelism import tokens

SCALE_BYTES = 4
"""Of the scale of one FP8 row, and of each statistic of a norm's row."""
BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 2}
"""Per element outside of FP8 GEMMs."""


def layer_bytes(config: Config, world: World) -> float:
    """Return the bytes that one layer stores per token of one micro-batch when nothing is recomputed."""
    by_layer = {
        Layer.frozen: _frozen_layer_bytes,
        Layer.trained: _trained_layer_bytes,
        Layer.megatron: _megatron_layer_bytes,
    }
    return by_layer[layer_of(config)](config, world)


def _frozen_layer_bytes(config: Config, world: World) -> float:
    """Return the bytes that a layer of a frozen base stores per token. Widths: hidden h, Q q, K or V k, MLP f.

    | stored tensor                              | in FP8         | in BF16     | split over       |
    | ------------------------------------------ | -------------- | ----------- | ---------------- |
    | inputs of qkv and fc1, normalized          | 2 h            | 4 h         | tp if sp         |
    | their scales per row; 1 / rms              | 8; 8           | 0; 8        | not split        |
    | q, k, v after RoPE                         | 2 (q + 2 k)    | 2 (q + 2 k) | tp               |
    | with norms on q and k: `qk_norm_bytes`     |                |             | tp               |
    | output of attention                        | 2 q            | 2 q         | tp               |
    | softmax statistics                         | 4 heads        | 4 heads     | tp               |
    | gate and up; their scales                  | 2 f; 8         | 4 f; 0      | tp; not split    |
    | LoRA: A dropout(x)                         | 2 rank         | 2 rank      | not split        |

    A 4-bit base computes in BF16. The residual stream is not stored, because a norm's backward pass uses the
    norm's output. Dropout masks are not stored either: the backward pass generates them again from their seeds.
    """
    model, lora, tp = config.model, config.training.lora, world.tp
    assert lora is not None
    row = quantized_bytes(config) * model.hidden_size / world.sequence_tp + _scale_bytes(config)
    attention = (2 * model.q_size + 4 * model.num_attention_heads) / tp + qk_norm_bytes(config, world)
    adapters = 2 * lora.rank * len(lora.target_modules)
    return 2 * (row + SCALE_BYTES) + (qkv_bytes(config, world) + fc1_bytes(config, world)) + attention + adapters


def _trained_layer_bytes(config: Config, world: World) -> float:
    """Return the bytes that a trained layer stores per token: p bytes per element, q per quantized element.

    | stored tensor                              | bytes          | split over    |
    | ------------------------------------------ | -------------- | ------------- |
    | inputs of the two norms                    | 2 p h          | tp if sp      |
    | 1 / rms of both, LayerNorm's means too     | 8; 16          | not split     |
    | q, k, v after RoPE                         | p (q + 2 k)    | tp            |
    | with norms on q and k: `qk_norm_bytes`     |                | tp            |
    | output of attention                        | p q            | tp            |
    | softmax statistics                         | 4 heads        | tp            |
    | output of fc1 (swiglu: gate and up)        | q f; 2 q f     | tp            |
    | in FP8, its scales per row                 | 4; 8           | not split     |

    The backward pass recomputes the outputs of the norms and of the activation: they are the inputs of linears, which
    the weights' gradients need.
    """
    model, size = config.model, BYTES[config.precision]
    stats = SCALE_BYTES * (2 if model.norm is Norm.LayerNorm else 1)
    norms = 2 * (size * model.hidden_size / world.sequence_tp + stats)
    attention = (size * model.q_size + 4 * model.num_attention_heads) / world.tp + qk_norm_bytes(config, world)
    return norms + (qkv_bytes(config, world) + fc1_bytes(config, world)) + attention


def hidden_bytes(config: Config, world: World) -> float:
    """Return the bytes of the hidden states of a micro-batch between two layers, on one rank."""
    return tokens(config, world) * BYTES[config.precision] * config.model.hidden_size / world.sequence_tp


def stores_inputs(config: Config, recomputed: Recomputed) -> bool:
    """Return whether a layer stores its own input; our frozen layer stores the norm's output instead."""
    return recomputed.full or layer_of(config) is not Layer.frozen


def quantized_bytes(config: Config) -> int:
    """Return the bytes per element of a GEMM's operand."""
    return 1 if config.precision is Precision.fp8 else BYTES[config.precision]


def _scale_bytes(config: Config) -> int:
    return SCALE_BYTES if config.precision is Precision.fp8 else 0


def qkv_bytes(config: Config, world: World) -> float:
    """Return the bytes per token of the qkv output that a hand-written layer stores."""
    return BYTES[config.precision] * linears(config.model)["linear_qkv"].num_out / world.tp


def qk_norm_bytes(config: Config, world: World) -> float:
    """Return the bytes per token that norms on the heads of q and k store: their inputs, and 1 / rms of each head."""
    model = config.model
    if not model.qk_norm:
        return 0.0
    heads = model.num_attention_heads + model.num_query_groups
    return (BYTES[config.precision] * (model.q_size + model.kv_size) + SCALE_BYTES * heads) / world.tp


def fc1_bytes(config: Config, world: World) -> float:
    """Return the bytes per token of the fc1 output that a hand-written layer stores: gate and up have scales each."""
    num_scales = 2 if config.model.activation is Activation.swiglu else 1
    numbers = linears(config.model)["linear_fc1"].num_out / world.tp
    return quantized_bytes(config) * numbers + num_scales * _scale_bytes(config)


def _megatron_layer_bytes(config: Config, world: World) -> float:
    """Return the bytes that megatron-core's BF16 or FP32 layer, frozen under adapters or trained, stores per token.

    Attention and SwiGLU are fused kernels; everything else is plain torch. p bytes per number, hidden width h, MLP
    width f.

    | stored tensor              | bytes             | split over | needed by                                        |
    | -------------------------- | ----------------- | ---------- | ------------------------------------------------ |
    | inputs of the two norms    | 2 p h             | tp if sp   | backward of the norms                            |
    | q, k, v                    | `_megatron_qkv_bytes`          | backward of attention                            |
    | output of attention        | p q               | tp         | backward of attention                            |
    | softmax statistics         | 4 heads           | tp         | backward of attention                            |
    | output of fc1              | p f, swiglu 2 p f | tp         | backward of the activation                       |
    | LoRA: dropout(x), its mask | (p + 1) width(x)  | as x       | gradient of A                                    |
    | LoRA: A dropout(x)         | p rank            | not split  | gradient of B                                    |
    | trained: x                 | p width(x)        | as x       | gradient of the projection's weight              |

    Without dropout an adapter stores x itself; the input of proj is the output of attention, which is stored already.
    """
    model, lora, size, tp = config.model, config.training.lora, BYTES[config.precision], world.tp
    projections = linears(model)
    stored = 2 * size * model.hidden_size / world.sequence_tp + _megatron_qkv_bytes(config, world)
    stored += size * (model.q_size + projections["linear_fc1"].num_out) / tp
    stored += 4 * model.num_attention_heads / tp
    if model.experts is not None:
        stored += _experts_bytes(config, world) - size * projections["linear_fc1"].num_out / tp
        projections = {name: linear for name, linear in projections.items() if name not in EXPERT_LINEARS}
    for name, linear in projections.items():
        split = world.sequence_tp if linear.is_column else tp
        stored += linear.num_in * _stored_input_bytes(name, lora, size) / split
    return stored + (size * lora.rank * len(lora.target_modules) if lora else 0)


def _experts_bytes(config: Config, world: World) -> float:
    """Return the bytes that megatron-core's MoE layer stores per token, if the experts get equally many tokens.

    p bytes per number, hidden width h, width f of an expert, E experts, of which a token has k:

    | stored tensor                                 | bytes           | split over |
    | --------------------------------------------- | --------------- | ---------- |
    | trained: input of the router                  | p h             | tp if sp   |
    | trained: inputs of the experts' fc1           | k p h           | not split  |
    | output of fc1 (gate and up)                   | 2 k p f         | tp         |
    | trained: input of fc2                         | k p f           | tp         |
    | weights of the k experts, also in FP32; indices | k (p + 20)    | not split  |
    | weights of all experts, and which are chosen  | (p + 1) E       | not split  |

    The dispatcher gathers the tokens of all tp and ep ranks; of these a rank computes those of its experts.
    """
    model, size, experts = config.model, BYTES[config.precision], config.model.experts
    assert experts is not None, "only layers with experts have this part"
    k, h, f = experts.experts_per_token, model.hidden_size, experts.ffn_hidden_size
    stored = 2 * k * size * f / world.tp + k * (size + 20) + (size + 1) * experts.num_experts
    if config.training.lora is None:
        stored += size * h / world.sequence_tp + k * size * h + k * size * f / world.tp
    return stored


def _megatron_qkv_bytes(config: Config, world: World) -> float:
    """Return the bytes of q, k and v that a BF16 or FP32 layer stores per token. Q width q, K or V width k, head
    width d. The inputs of norms on q and k are a part of the output of qkv.

    | stored tensor                                          | bytes       | split over |
    | ------------------------------------------------------ | ----------- | ---------- |
    | the whole output of qkv, because v is a view of it     | p (q + 2 k) | tp         |
    | with RoPE: q and k after it                            | p (q + k)   | tp         |
    | without RoPE, under GQA: q, copied into its own tensor | p q         | tp         |
    | with RoPE: cosines and sines, for q and for k          | 4 p d       | not split  |

    All rows of a micro-batch share the cosines and sines; this counts them for each row.
    """
    model, size = config.model, BYTES[config.precision]
    qkv, angles = linears(model)["linear_qkv"].num_out, 0
    if model.position is Position.rope:
        qkv += model.q_size + model.kv_size
        angles = 4 * model.head_size
    elif model.num_query_groups < model.num_attention_heads:
        qkv += model.q_size
    return size * (qkv / world.tp + angles)


def _stored_input_bytes(name: str, lora: Lora | None, size: int) -> int:
    """Return the bytes stored per number of a projection's input, for the gradient of its adapter or of its weight."""
    if lora is None:
        return 0 if name == "linear_proj" else size
    if name not in lora.target_modules:
        return 0
    if lora.dropout:
        return size + 1  # the output of dropout, and the mask
    return 0 if name == "linear_proj" else size  # attention stores its output, which is the input of proj
