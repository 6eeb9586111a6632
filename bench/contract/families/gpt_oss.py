"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, and a sliding window in every second layer.

megatron-core has these layers only with Transformer Engine, so engine=megatron refuses the family. The weights are
published in MXFP4, which transformers dequantises on load.

Source: transformers 5.23, GptOssConfig, GptOssAttention and GptOssExperts.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.contract.families import llama, mixtral
from bench.contract.families.family import ConfigJson, Family, Fixed, Unit, Weight
from bench.contract.families.mixtral import experts_of
from bench.contract.model import Activation, Experts, Model, Norm, Position
from bench.contract.schema import EngineName

FACTOR = 32.0
YARN = {
    "rope_type": "yarn",
    "factor": FACTOR,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Settings of RoPE that every gpt-oss has."""
THETA = 150000.0
_SIZES = {"num_hidden_layers": 36, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
_DEFAULTS = _SIZES | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "rms_norm_eps": 1e-5}


def _rope(config: ConfigJson) -> dict[str, Any]:
    settings = config.values.get("rope_scaling") or config.values.get("rope_parameters") or YARN
    return {"rope_theta": config.values.get("rope_theta") or THETA} | dict(settings)


def _layer_types(num_layers: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]


def _refused(config: ConfigJson) -> list[str]:
    """Return other layers and another RoPE than gpt-oss has, as clauses."""
    rope, num_layers = _rope(config), config.count("num_hidden_layers", 36)
    wrong = [
        f"{key} of RoPE is {rope.get(key)} (supported: {one})" for key, one in YARN.items() if rope.get(key) != one
    ]
    is_other = config.values.get("layer_types") not in (None, _layer_types(num_layers))
    return wrong + (["layer_types do not alternate between sliding_attention and full_attention"] if is_other else [])


def _model_of(config: ConfigJson, **names: Any) -> Model:
    given = ConfigJson(_DEFAULTS | dict(config.values), config.where)
    width = given.count("intermediate_size")
    return Model(
        num_layers=given.count("num_hidden_layers"),
        hidden_size=given.count("hidden_size"),
        ffn_hidden_size=width,
        num_attention_heads=given.count("num_attention_heads"),
        num_query_groups=given.count("num_key_value_heads"),
        head_dim=given.count("head_dim"),
        vocab_size=given.count("vocab_size"),
        max_seq_length=given.count("max_position_embeddings", 131072),
        norm=Norm.RMSNorm,
        norm_epsilon=given.number("rms_norm_eps", 1e-5),
        activation=Activation.swiglu,
        position=Position.rope,
        rope_base=int(_rope(given)["rope_theta"]),
        rope_scaling_factor=FACTOR,
        bias=True,
        tied_embeddings=given.flag("tie_word_embeddings", default=False),
        family="gpt_oss",
        experts=Experts(
            num_experts=given.count("num_local_experts", 128),
            experts_per_token=given.count("num_experts_per_tok", 4),
            ffn_hidden_size=width,
            aux_loss_coef=mixtral.aux_loss_coef(given),
        ),
        attention_sinks=True,
        sliding_window=given.count("sliding_window", 128),
        **names,
    )


def _config_of(m: Model) -> dict[str, Any]:
    experts, shared = experts_of(m), llama.config_of(m)
    return {key: value for key, value in shared.items() if key not in ("mlp_bias", "rope_scaling", "rope_theta")} | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": m.mlp_size,
        "head_dim": m.head_size,
        "rope_parameters": YARN | {"rope_theta": float(m.rope_base)},
        "attention_bias": True,
        "sliding_window": m.sliding_window,
        "layer_types": _layer_types(m.num_layers),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        **mixtral.aux_loss_settings(experts),
    }


def _units(model: Model, *, fused: bool) -> list[Unit]:
    """Return the tensors by transformers' names; no layer of megatron-core holds them, so they have the same keys."""
    h = model.hidden_size
    table = (model.vocab_size, h)
    first = {"model.embed_tokens.weight": table}
    last = {"model.norm.weight": (h,)} | ({} if model.tied_embeddings else {"lm_head.weight": table})
    layers = [
        Unit(f"layer_{i:03}", _same(dict(_layer(model, f"model.layers.{i}.")), i)) for i in range(model.num_layers)
    ]
    return [Unit("embedding", _same(first, None)), *layers, Unit("output", _same(last, None))]


def _same(shapes: Mapping[str, tuple[int, ...]], layer: int | None) -> list[Weight]:
    return [Weight(name, layer, {name: shape}) for name, shape in shapes.items()]


def _layer(m: Model, near: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a layer's tensors; matrices of experts are [experts, inputs, outputs]."""
    h, f, n, q, kv = m.hidden_size, m.mlp_size, experts_of(m).num_experts, m.q_size, m.kv_size
    attention, mlp = f"{near}self_attn.", f"{near}mlp."
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{near}{name}.weight", (h,)
    for name, (num_in, num_out) in {"q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h)}.items():
        yield f"{attention}{name}_proj.weight", (num_out, num_in)
        yield f"{attention}{name}_proj.bias", (num_out,)
    yield f"{attention}sinks", (m.num_attention_heads,)
    yield f"{mlp}router.weight", (n, h)
    yield f"{mlp}router.bias", (n,)
    yield f"{mlp}experts.gate_up_proj", (n, h, 2 * f)
    yield f"{mlp}experts.gate_up_proj_bias", (n, 2 * f)
    yield f"{mlp}experts.down_proj", (n, f, h)
    yield f"{mlp}experts.down_proj_bias", (n, h)


def _has_layers_of(m: Model) -> bool:
    layers = (m.norm, m.activation, m.position, m.bias) == (Norm.RMSNorm, Activation.swiglu, Position.rope, True)
    return (
        layers and m.attention_sinks and m.sliding_window is not None and bool(m.experts and m.experts.normalize_top_k)
    )


FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    fixed=(
        *(llama.ACTIVATION, Fixed("attention_bias", True, (True,)), Fixed("swiglu_alpha", 1.702, (1.702,))),
        Fixed("swiglu_limit", 7.0, (7, 7.0)),
    ),
    refused=_refused,
    has_layers_of=_has_layers_of,
    model_of=_model_of,
    config_of=_config_of,
    units=_units,
    engines=(EngineName.huggingface,),
    why_not_others="attention sinks, sliding windows, biases of router and experts and a clamped SwiGLU, which "
    "megatron-core has only with Transformer Engine",
    dequantised=("mxfp4",),
)
