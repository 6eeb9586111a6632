"""Llama 2 and 3, SmolLM (with tied embeddings), and MLPerf's custom_llama, whose q, k and v are one tensor.

Families with the same config.json and layers, but for a few keys, use the functions of this file.
Sources: transformers 5.23, LlamaConfig; mlcommons/training, llama2_70b_lora (custom_llama).
"""

from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

from bench.contract.families.family import ConfigJson, Family, Fixed, Unit, Weight
from bench.contract.model import Activation, Model, Norm, Position
from bench.contract.schema import EngineName

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of megatron-core's rope_scaling. Source: megatron-core 0.16.1, RotaryEmbedding._apply_scaling."""
PIECES = 8
"""Number of pieces along the TP axis, if it divides evenly, so that a TP rank reads only its own pieces."""
ACTIVATION = Fixed("hidden_act", "silu", ("silu",))


def sizes(config: ConfigJson, **others: Any) -> Model:
    """Return the model of a config.json with Llama's keys; others: fields that differ in a family."""
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    head_dim = config.count("head_dim", hidden // heads)
    base, factor = rope(config)
    return Model(
        num_layers=config.count("num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=config.count("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=config.count("num_key_value_heads", heads),
        vocab_size=config.count("vocab_size"),
        max_seq_length=config.count("max_position_embeddings", 2048),
        norm=Norm.RMSNorm,
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        activation=Activation.swiglu,
        position=Position.rope,
        rope_base=base,
        rope_scaling_factor=factor,
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        head_dim=None if head_dim * heads == hidden else head_dim,
        **others,
    )


def rope(config: ConfigJson) -> tuple[int, float]:
    """Return RoPE's base and scaling factor; 1 without Llama 3's scaling."""
    settings = _rope_settings(config)
    base = ConfigJson(settings, config.where).number("rope_theta", config.number("rope_theta", 10000.0))
    is_scaled = _rope_type(settings) == "llama3"
    return int(base), ConfigJson(settings, config.where).number("factor", 1.0) if is_scaled else 1.0


def refused_rope(config: ConfigJson) -> list[str]:
    """Return the settings of RoPE that our layers do not have, as clauses."""
    settings = _rope_settings(config)
    if (kind := _rope_type(settings)) not in ("default", "llama3"):
        return [f"rope_type is {kind} (supported: default or llama3)"]
    base = settings.get("rope_theta") or config.values.get("rope_theta") or 10000
    partial = settings.get("partial_rotary_factor", config.values.get("partial_rotary_factor"))
    constants = LLAMA3_ROPE if kind == "llama3" else {}
    return [
        *(
            f"{key} is {settings.get(key)} (supported: {value})"
            for key, value in constants.items()
            if settings.get(key) != value
        ),
        *([f"rope_theta is {base} (supported: whole numbers)"] if base != int(base) else []),
        *([f"partial_rotary_factor is {partial} (supported: 1)"] if partial not in (None, 1) else []),
    ]


def _rope_settings(config: ConfigJson) -> dict[str, Any]:
    """Return the settings of RoPE as transformers 4 (rope_scaling) or 5 (rope_parameters) writes them."""
    settings = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    return dict(settings)


def _rope_type(settings: dict[str, Any]) -> str:
    return str(settings.get("rope_type") or settings.get("type") or "default")


def has_rotary_layers(model: Model) -> bool:
    """Return whether the layers are Llama's but for biases of q, k and v, norms on q and k, and experts."""
    layers = (model.norm, model.activation, model.position, model.bias)
    has_full_attention = not model.attention_sinks and model.sliding_window is None
    return layers == (Norm.RMSNorm, Activation.swiglu, Position.rope, False) and has_full_attention


def config_of(m: Model) -> dict[str, Any]:
    """Return the keys of config.json that all families with Llama's keys have."""
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
        **({} if m.head_dim is None else {"head_dim": m.head_dim}),
        "max_position_embeddings": m.max_seq_length,
        "rms_norm_eps": m.norm_epsilon,
        "rope_theta": float(m.rope_base),
        "rope_scaling": None if m.rope_scaling_factor == 1 else scaling,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": m.tied_embeddings,
    }


def units(model: Model, *, fused: bool, mlp: Callable[[Model, int], Iterator[Weight]] | None = None) -> list[Unit]:
    """Return the model's tensors in units that fit in memory; fused: q, k and v are one tensor in the source.

    mlp: yields the tensors of a layer's MLP in place of Llama's.
    """
    mlp = mlp or _mlp
    table = (model.vocab_size, model.hidden_size)
    pieces = gcd(PIECES, model.vocab_size)
    embedding = Weight("embedding.word_embeddings.weight", None, {"model.embed_tokens.weight": table}, 0, pieces)
    last = [Weight("decoder.final_layernorm.weight", None, {"model.norm.weight": (model.hidden_size,)})]
    if not model.tied_embeddings:
        last.append(Weight("output_layer.weight", None, {"lm_head.weight": table}, 0, pieces))
    layers = [
        Unit(f"layer_{i:03}", [*attention(model, i, fused=fused), *_pre_mlp_norm(model, i), *mlp(model, i)])
        for i in range(model.num_layers)
    ]
    return [Unit("embedding", [embedding]), *layers, Unit("output", last)]


def attention(m: Model, i: int, *, fused: bool) -> Iterator[Weight]:
    """Yield the tensors of a layer's attention, and its norm."""
    h, q, kv = m.hidden_size, m.q_size, m.kv_size
    near, far = f"model.layers.{i}.", "decoder.layers."
    widths = {"q_proj": q, "k_proj": kv, "v_proj": kv} if not fused else {"qkv_proj": q + 2 * kv}
    qkv = {f"{near}self_attn.{name}.weight": (width, h) for name, width in widths.items()}
    yield Weight(f"{far}input_layernorm.weight", i, {f"{near}input_layernorm.weight": (h,)})
    yield Weight(f"{far}self_attention.linear_qkv.weight", i, qkv, 0, gcd(PIECES, m.num_query_groups))
    if m.qkv_bias:
        biases = {f"{near}self_attn.{name}.bias": (width,) for name, width in widths.items()}
        yield Weight(f"{far}self_attention.linear_qkv.bias", i, biases, 0, gcd(PIECES, m.num_query_groups))
    if m.qk_norm:
        for name in ("q", "k"):
            norm = {f"{near}self_attn.{name}_norm.weight": (m.head_size,)}
            yield Weight(f"{far}self_attention.{name}_layernorm.weight", i, norm)
    out = {f"{near}self_attn.o_proj.weight": (h, q)}
    yield Weight(f"{far}self_attention.linear_proj.weight", i, out, 1, gcd(PIECES, m.num_attention_heads))


def _pre_mlp_norm(m: Model, i: int) -> Iterator[Weight]:
    norm = {f"model.layers.{i}.post_attention_layernorm.weight": (m.hidden_size,)}
    yield Weight("decoder.layers.pre_mlp_layernorm.weight", i, norm)


def _mlp(m: Model, i: int) -> Iterator[Weight]:
    h, f, near, far = m.hidden_size, m.ffn_hidden_size, f"model.layers.{i}.", "decoder.layers."
    gates = {f"{near}mlp.{name}.weight": (f, h) for name in ("gate_proj", "up_proj")}
    yield Weight(f"{far}mlp.linear_fc1.weight", i, gates, 0, 2 * gcd(PIECES, f))  # gates first, then ups: each is split
    yield Weight(f"{far}mlp.linear_fc2.weight", i, {f"{near}mlp.down_proj.weight": (h, f)}, 1, gcd(PIECES, f))


def _has_layers_of(m: Model) -> bool:
    return has_rotary_layers(m) and not (m.qkv_bias or m.qk_norm or m.experts)


FAMILY = Family(
    name="llama",
    model_types=("llama", "custom_llama"),
    fixed=(ACTIVATION, Fixed("attention_bias", False, (False,)), Fixed("mlp_bias", False, (False,))),
    refused=refused_rope,
    has_layers_of=_has_layers_of,
    model_of=lambda config, **names: sizes(config, **names),
    config_of=config_of,
    units=units,
    engines=tuple(EngineName),
)
