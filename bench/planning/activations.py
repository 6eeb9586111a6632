"""What one layer keeps per token of a micro-batch for its backward pass, on one rank."""

from bench.contract.plan import World
from bench.contract.schema import Config, Lora, Position, Precision
from bench.planning.parameters import kv_size, linears

SCALE_BYTES = 4
"""Of a row in FP8; also 1 / rms of a row."""
BYTES = {Precision.fp32: 4, Precision.bf16: 2, Precision.fp8: 2}
"""Of a number outside of the FP8 products."""


def layer_bytes(config: Config, world: World) -> float:
    """Return bytes that one layer keeps per token of one micro-batch for its backward pass, where nothing is recomputed."""
    return _fp8_bytes(config, world) if config.precision is Precision.fp8 else _plain_bytes(config, world)


def _fp8_bytes(config: Config, world: World) -> float:
    """Return what an FP8 layer keeps per token. Hidden width h, K or V width k, MLP width f.

    | kept                                       | bytes          | split over |
    | ------------------------------------------ | -------------- | ---------- |
    | inputs of qkv and fc1, normalised, in FP8  | 2 h            | tp if sp   |
    | their rows' scales, and 1 / rms            | 16             | nothing    |
    | q, k, v after RoPE                         | 2 (h + 2 k)    | tp         |
    | attention's output                         | 2 h            | tp         |
    | softmax statistics                         | 4 heads        | tp         |
    | gate and up, in FP8 with a scale each      | 2 f; 8         | tp; nothing |
    | LoRA: A dropout(x)                         | 2 rank         | nothing    |

    The residual is not kept: a norm's backward takes its output. Dropout's masks are made again from their seeds.
    """
    model, lora, tp = config.model, config.task.training.lora, world.tp
    assert lora is not None
    kept = 2 * (model.hidden_size / world.sequence_tp + 2 * SCALE_BYTES)
    kept += qkv_bytes(config, world) + fc1_bytes(config, world)
    kept += (2 * model.hidden_size + 4 * model.num_attention_heads) / tp
    return kept + 2 * lora.rank * len(lora.target_modules)


def qkv_bytes(config: Config, world: World) -> float:
    """Return what a layer keeps of qkv's output per token in BF16."""
    return 2 * linears(config.model)["linear_qkv"].num_out / world.tp


def fc1_bytes(config: Config, world: World) -> float:
    """Return what a layer keeps of fc1's output per token in FP8."""
    return linears(config.model)["linear_fc1"].num_out / world.tp + 2 * SCALE_BYTES


def _plain_bytes(config: Config, world: World) -> float:
    """Return what megatron-core's BF16 or FP32 layer keeps per token, with fused attention and SwiGLU and all else in plain torch.

    p bytes per number, hidden width h, MLP width f.

    | kept                       | bytes             | split over | for the                                  |
    | -------------------------- | ----------------- | ---------- | ---------------------------------------- |
    | inputs of the two norms    | 2 p h             | tp if sp   | norms' backward, frozen or not           |
    | inputs of qkv and fc1      | 2 p h             | tp if sp   | weights' gradient: not kept when frozen  |
    | q, k, v                    | `_plain_qkv_bytes` |           | attention's backward                     |
    | attention's output         | p h               | tp         | same, and proj's weights' gradient       |
    | softmax statistics         | 4 heads           | tp         | attention's backward                     |
    | fc1's output               | p f, swiglu 2 p f | tp         | activation's backward                    |
    | input of fc2               | p f               | tp         | weights' gradient: not kept when frozen  |
    | LoRA: dropout(x), its mask | (p + 1) width(x)  | as x       | gradient of A                            |
    | LoRA: A dropout(x)         | p rank            | nothing    | gradient of B                            |

    Without dropout an adapter keeps x itself, which attention already keeps for proj. In BF16 a GPT layer (f = 4 h) comes
    to 32 h, which is Korthikanti et al. 2022's 34 h less its two dropout masks.
    """
    model, lora, size, tp = config.model, config.task.training.lora, BYTES[config.precision], world.tp
    projections = linears(model)
    kept = 2 * size * model.hidden_size / world.sequence_tp + _plain_qkv_bytes(config, world)
    kept += size * (model.hidden_size + projections["linear_fc1"].num_out) / tp
    kept += 4 * model.num_attention_heads / tp
    for name, linear in projections.items():
        split = world.sequence_tp if linear.is_column else tp
        kept += linear.num_in * _kept_input_bytes(name, lora, size) / split
    if lora:
        kept += size * lora.rank * len(lora.target_modules)
    return kept


def _plain_qkv_bytes(config: Config, world: World) -> float:
    """Return what a BF16 or FP32 layer keeps of qkv per token. Hidden width h, K or V width k, head width d.

    | kept                                             | bytes       | split over |
    | ------------------------------------------------ | ----------- | ---------- |
    | qkv's output, all of it: v is a view of it       | p (h + 2 k) | tp         |
    | with RoPE: q and k after it                      | p (h + k)   | tp         |
    | without, under GQA: q, copied to be one tensor   | p h         | tp         |
    | with RoPE: cosines and sines, for q and for k    | 4 p d       | nothing    |

    The rows of a micro-batch share cosines and sines, which are counted for each.
    """
    model, size = config.model, BYTES[config.precision]
    qkv, angles = linears(model)["linear_qkv"].num_out, 0
    if model.position is Position.rope:
        qkv += model.hidden_size + kv_size(model)
        angles = 4 * model.hidden_size // model.num_attention_heads
    elif model.num_query_groups < model.num_attention_heads:
        qkv += model.hidden_size
    return size * (qkv / world.tp + angles)


def _kept_input_bytes(name: str, lora: Lora | None, size: int) -> int:
    """Return bytes kept per number of a projection's input, for the gradient of its weights or of its adapter's."""
    if lora is None or (name in lora.target_modules and not lora.dropout):
        return 0 if name == "linear_proj" else size  # attention keeps its output, which is proj's input, anyway
    return size + 1 if name in lora.target_modules else 0  # dropout's output and its mask
