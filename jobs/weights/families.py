"""The model families that can be exported: transformers' names, shapes and config.json of Llama and GPT-2."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.contract.llama_config import LLAMA3_ROPE
from bench.contract.model import Activation, Model, Norm, Position
from bench.errors import ConfigError
from jobs.weights import tensor_map
from jobs.weights.tensor_map import Weight, separate


@dataclass(frozen=True, slots=True)
class Family:
    """How megatron-core's tensors are converted to those of a model in transformers."""

    weights: Callable[[Model], list[Weight]]
    """All tensors, each with the names and shapes of its exported tensors."""
    parts: Callable[[Weight, Tensor, Model], list[Tensor]]
    """Converts a tensor to its exported tensors."""
    config: Callable[[Model], dict[str, Any]]
    """config.json, without the dtype."""


def family_of(model: Model) -> Family:
    """Return the family of a model.

    Raises:
        ConfigError: transformers has no such model.
    """
    shape = (model.norm, model.activation, model.position, model.bias)
    if shape == (Norm.RMSNorm, Activation.swiglu, Position.rope, False):
        return Family(_llama_weights, _llama_parts, _llama_config)
    has_all_heads = model.num_query_groups == model.num_attention_heads
    if shape == (Norm.LayerNorm, Activation.gelu, Position.learned, True) and has_all_heads:
        return Family(_gpt2_weights, _gpt2_parts, _gpt2_config)
    raise ConfigError(
        f"transformers has no model with the layers of {model.name}: {model.norm.name}, {model.activation.name}, "
        f"{model.position.name} positions, bias {model.bias}, {model.num_query_groups} query groups",
        where="model",
        fix="export a Llama (RMSNorm, swiglu, rope, no bias) or a GPT-3 (LayerNorm, gelu, learned positions, biases)",
    )


def _llama_weights(model: Model) -> list[Weight]:
    return [weight for unit in tensor_map.units(model, fused=False) for weight in unit.weights]


def _llama_parts(weight: Weight, data: Tensor, model: Model) -> list[Tensor]:
    if ".linear_qkv." in weight.key:
        return separate(data, heads=model.num_attention_heads, groups=model.num_query_groups)
    return list(data.split([shape[0] for shape in weight.sources.values()]))


def _llama_config(m: Model) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": m.rope_scaling_factor, **LLAMA3_ROPE}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.num_query_groups,
        "max_position_embeddings": m.max_seq_length,
        "rms_norm_eps": m.norm_epsilon,
        "rope_theta": float(m.rope_base),
        "rope_scaling": None if m.rope_scaling_factor == 1 else scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": m.tied_embeddings,
    }


def _gpt2_weights(model: Model) -> list[Weight]:
    m, near = model, "transformer."
    h, last = m.hidden_size, {"weight": (m.hidden_size,), "bias": (m.hidden_size,)}
    return [
        Weight("embedding.word_embeddings.weight", None, {f"{near}wte.weight": (m.vocab_size, h)}),
        Weight("embedding.position_embeddings.weight", None, {f"{near}wpe.weight": (m.max_seq_length, h)}),
        *(weight for i in range(m.num_layers) for weight in _gpt2_layer(m, i)),
        *(Weight(f"decoder.final_layernorm.{x}", None, {f"{near}ln_f.{x}": shape}) for x, shape in last.items()),
        *([] if m.tied_embeddings else [Weight("output_layer.weight", None, {"lm_head.weight": (m.vocab_size, h)})]),
    ]


def _gpt2_layer(m: Model, i: int) -> Iterator[Weight]:
    """Yield a layer's weights; transformers' Conv1D holds the transpose of a linear's matrix, [I, O]."""
    h, f, near, far = m.hidden_size, m.ffn_hidden_size, f"transformer.h.{i}.", "decoder.layers."
    for theirs, ours, num_in, num_out in (
        ("ln_1", "input_layernorm", None, h),
        ("attn.c_attn", "self_attention.linear_qkv", h, 3 * h),
        ("attn.c_proj", "self_attention.linear_proj", h, h),
        ("ln_2", "pre_mlp_layernorm", None, h),
        ("mlp.c_fc", "mlp.linear_fc1", h, f),
        ("mlp.c_proj", "mlp.linear_fc2", f, h),
    ):
        shape = (num_out,) if num_in is None else (num_in, num_out)
        yield Weight(f"{far}{ours}.weight", i, {f"{near}{theirs}.weight": shape})
        yield Weight(f"{far}{ours}.bias", i, {f"{near}{theirs}.bias": (num_out,)})


def _gpt2_parts(weight: Weight, data: Tensor, model: Model) -> list[Tensor]:
    if ".linear_qkv." in weight.key:
        data = torch.cat(separate(data, heads=model.num_attention_heads, groups=model.num_query_groups))
    return [data.T if ".linear_" in weight.key and data.dim() == 2 else data]


def _gpt2_config(m: Model) -> dict[str, Any]:
    """Return config.json; `gelu` is the exact one, as in our engine; GPT-2 was trained with an approximation."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": m.vocab_size,
        "n_positions": m.max_seq_length,
        "n_embd": m.hidden_size,
        "n_layer": m.num_layers,
        "n_head": m.num_attention_heads,
        "n_inner": m.ffn_hidden_size,
        "activation_function": "gelu",
        "layer_norm_epsilon": m.norm_epsilon,
        "tie_word_embeddings": m.tied_embeddings,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
