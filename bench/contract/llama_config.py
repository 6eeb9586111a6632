"""Compare a Llama's config.json with the model of a plan. Standard library only: ranks import it."""

from typing import Any

from bench.contract.model import Activation, Model, Norm, Position
from bench.errors import ConfigError

FAMILIES = ("llama", "custom_llama")
"""custom_llama is MLPerf's Llama-2-70B: q, k and v are one tensor. Source: mlcommons/training, llama2_70b_lora."""
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of megatron-core's rope_scaling. Source: megatron-core 0.16.1, RotaryEmbedding._apply_scaling."""


def check(config: dict[str, Any], model: Model, *, where: str) -> None:
    """Refuse a config.json that does not match the plan's model. The context length is not compared: RoPE has none.

    Raises:
        ConfigError: they differ, or the engine does not support this kind of Llama.
    """
    if config.get("model_type") not in FAMILIES or config.get("quantization_config"):
        kind = "quantised weights" if config.get("quantization_config") else f"model_type {config.get('model_type')!r}"
        raise ConfigError(
            f"the folder has {kind}, but {model.name} needs unquantised weights with model_type llama",
            where=where,
            fix="set MODEL to a folder with unquantised weights with model_type llama",
        )
    if wrong := differences(config, model):
        raise ConfigError(
            f"config.json does not match {model.name}: {'; '.join(wrong)}",
            where=where,
            fix=f"set model= to a model of conf/model/ with these values, or correct {model.name}.yaml",
        )


def differences(config: dict[str, Any], model: Model) -> list[str]:
    """Return the differences between config.json and the model, with the names on both sides."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = hidden // heads if hidden and heads else None
    is_llama = (model.norm, model.activation, model.position) == (Norm.RMSNorm, Activation.swiglu, Position.rope)
    compared = [
        ("model_type", "llama", "norm, activation and position", "llama" if is_llama else "not llama"),
        ("num_hidden_layers", config.get("num_hidden_layers"), "num_layers", model.num_layers),
        ("hidden_size", hidden, "hidden_size", model.hidden_size),
        ("intermediate_size", config.get("intermediate_size"), "ffn_hidden_size", model.ffn_hidden_size),
        ("num_attention_heads", heads, "num_attention_heads", model.num_attention_heads),
        ("num_key_value_heads", config.get("num_key_value_heads") or heads, "num_query_groups", model.num_query_groups),
        ("head_dim", config.get("head_dim") or head_dim, "hidden_size / heads", head_dim),
        ("vocab_size", config.get("vocab_size"), "vocab_size", model.vocab_size),
        ("rms_norm_eps", config.get("rms_norm_eps"), "norm_epsilon", model.norm_epsilon),
        ("hidden_act", config.get("hidden_act", "silu"), "activation (swiglu)", "silu"),
        ("tie_word_embeddings", config.get("tie_word_embeddings", False), "tied_embeddings", model.tied_embeddings),
        ("attention_bias", config.get("attention_bias", False), "bias", model.bias),
        ("mlp_bias", config.get("mlp_bias", False), "bias", model.bias),
        *_rope(config, model),
    ]
    return [
        f"{theirs} is {actual}, but {ours} is {expected}"
        for theirs, actual, ours, expected in compared
        if actual != expected
    ]


def _rope(config: dict[str, Any], model: Model) -> list[tuple[str, Any, str, Any]]:
    """Compare the RoPE settings of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = config.get("rope_theta") or rope.get("rope_theta") or 10000
    compared: list[tuple[str, Any, str, Any]] = [("rope_theta", float(theta), "rope_base", float(model.rope_base))]
    if kind == "default":
        return [*compared, ("rope scaling factor", 1.0, "rope_scaling_factor", model.rope_scaling_factor)]
    if kind != "llama3":
        return [*compared, ("rope_type", kind, "the supported type", "default or llama3")]
    fixed = [(name, rope.get(name), "megatron-core's value", value) for name, value in LLAMA3_ROPE.items()]
    return [
        *compared,
        ("rope scaling factor", rope.get("factor"), "rope_scaling_factor", model.rope_scaling_factor),
        *fixed,
    ]
