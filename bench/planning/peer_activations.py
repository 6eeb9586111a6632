"""How many bytes transformers' layers store per token for the backward pass, under engine=huggingface.

Counted from what autograd saves of transformers 5.23's Llama and GPT-2; tests/planning compares it with that.
"""

from bench.contract.huggingface import Attention, Bf16, HuggingFace, Strategy
from bench.contract.schema import Config, Precision
from bench.contract.task import Norm, Trains
from bench.planning.parameters import kv_size, linears

QKV_ADAPTERS = {"linear_qkv": 3, "linear_proj": 1}
"""PEFT's adapters in the place of one of megatron-core's linears: q, k and v have one each, with a common A."""
LOSS_BYTES = 12
"""Per logit while the loss is differentiated: log-softmax in FP32 and two gradients of that size."""


def compute_bytes(config: Config) -> int:
    """Return the bytes of a number in products."""
    return 4 if config.precision is Precision.fp32 else 2


def is_autocast(config: Config, peer: HuggingFace) -> bool:
    """Return whether products are computed in BF16 from trained weights in FP32, under autocast."""
    is_fsdp = peer.strategy in (Strategy.fsdp2, Strategy.fsdp2_hybrid)  # its gathered weights are BF16: no autocast
    return config.precision is Precision.bf16 and peer.bf16_mode is Bf16.autocast and not is_fsdp


def residual_bytes(config: Config, peer: HuggingFace) -> int:
    """Return the bytes of a number of the residual stream: FP32 below trained embeddings in FP32."""
    is_wide = is_autocast(config, peer) and config.training.trains is Trains.all
    return 4 if is_wide else compute_bytes(config)


def layer_bytes(config: Config, peer: HuggingFace) -> float:
    """Return the bytes that one layer stores per token of one micro-batch."""
    is_llama = config.model.norm is Norm.RMSNorm
    if config.training.trains is not Trains.all:
        return _frozen_llama_bytes(config, peer)
    return _llama_bytes(config, peer) if is_llama else _gpt2_bytes(config, peer)


def _llama_bytes(config: Config, peer: HuggingFace) -> float:
    """Return the bytes of a Llama layer whose weights are trained: p bytes a number of products, hidden h, MLP f.

    | stored tensor                                          | bytes            | under autocast |
    | ------------------------------------------------------ | ---------------- | -------------- |
    | inputs of the two norms, in FP32; 1 / rms              | 8 h + 8          | 8 h + 8        |
    | normalized, before the norm's weight                   | 2 p h            | 8 h            |
    | inputs of q, k, v and of gate, up                      | 2 p h            | 5 p h          |
    | q, k, v after RoPE, output of attention; see attention | p (h + 2 k), p h | as without     |
    | gate, its SiLU, up, their product                      | 4 p f            | 4 p f          |
    """
    h, f, p = config.model.hidden_size, config.model.ffn_hidden_size, compute_bytes(config)
    norms = 8 * h + 8 + (8 * h + 5 * p * h if is_autocast(config, peer) else 4 * p * h)
    return norms + _attention_bytes(config, peer) + 4 * p * f


def _frozen_llama_bytes(config: Config, peer: HuggingFace) -> float:
    """Return the bytes of a Llama layer under adapters: linears that are frozen store no input.

    | stored tensor                                 | bytes                                                     |
    | --------------------------------------------- | --------------------------------------------------------- |
    | inputs of the two norms, in FP32; 1 / rms     | 8 h + 8                                                   |
    | q, k, v after RoPE, output of attention       | p (h + 2 k), p h                                          |
    | gate, its SiLU, up                            | 3 p f                                                     |
    | inputs of adapters: without dropout           | p h for q, k, v together; under autocast p h for each     |
    | with dropout: its output and its mask, each   | (p + 1) h                                                 |
    | A x, each                                     | p rank                                                    |
    """
    lora, h, f = config.training.lora, config.model.hidden_size, config.model.ffn_hidden_size
    assert lora is not None
    p, count = compute_bytes(config), sum(QKV_ADAPTERS[name] for name in lora.target_modules)
    inputs = p * h if "linear_qkv" in lora.target_modules else 0  # attention's output is stored already
    has_copies = lora.dropout > 0 or is_autocast(config, peer)
    if has_copies:
        inputs = count * (p + (1 if lora.dropout else 0)) * h
    if peer.attention is Attention.eager and (has_copies or "linear_proj" not in lora.target_modules):
        inputs -= p * h  # eager attention does not need its output, which nobody else stores then
    return 8 * h + 8 + _attention_bytes(config, peer) + 3 * p * f + inputs + count * p * lora.rank


def _gpt2_bytes(config: Config, peer: HuggingFace) -> float:
    """Return the bytes of a GPT-2 layer whose weights are trained; r bytes a number of the residual stream.

    | stored tensor                                  | bytes          |
    | ---------------------------------------------- | -------------- |
    | inputs of the two norms; their mean and 1 / sd | 2 r h + 4 r    |
    | outputs of the two norms                       | 2 p h          |
    | q, k, v, output of attention                   | 3 p h, p h     |
    | input and output of GELU                       | 2 p f          |
    """
    h, f, p = config.model.hidden_size, config.model.ffn_hidden_size, compute_bytes(config)
    r = residual_bytes(config, peer)
    return 2 * r * h + 4 * r + 2 * p * h + _attention_bytes(config, peer) + 2 * p * f


def _attention_bytes(config: Config, peer: HuggingFace) -> float:
    """Return the bytes of q, k, v, the output, and what the kind of attention stores beside them.

    sdpa and flash_attention_2 store one FP32 number a head. eager stores the probabilities, heads x row length numbers
    a token: in the type of products, and a Llama's, or any under autocast, in FP32 too; and k, v for every head.
    """
    model, p, a = config.model, compute_bytes(config), config.model.num_attention_heads
    stored = p * (linears(model)["linear_qkv"].num_out + model.hidden_size)
    if peer.attention is not Attention.eager:
        return stored + 4 * a
    is_upcast = p == 2 and (model.norm is Norm.RMSNorm or is_autocast(config, peer))
    repeated = 2 * p * (model.hidden_size - kv_size(model))
    return stored + repeated + (p + (4 if is_upcast else 0)) * a * config.data.seq_length


def transient_bytes(config: Config, peer: HuggingFace) -> float:
    """Return the peak bytes per token of temporary tensors in the layer at work, beside what is stored; an estimate.

    Backward of the MLP has gradients of the product, of SiLU and of both projections; that of eager attention, of the
    probabilities in both types.
    """
    model, p = config.model, compute_bytes(config)
    mlp = 4 * p * model.ffn_hidden_size
    is_eager = peer.attention is Attention.eager
    return max(mlp, (p + 8) * model.num_attention_heads * config.data.seq_length if is_eager else 0)
