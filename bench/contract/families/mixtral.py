"""Mixtral: Llama with a mixture of experts in place of the MLP. A sliding window is refused: our attention has none.

Source: transformers 5.23, MixtralConfig, MixtralTopKRouter and conversion_mapping.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

from bench.contract.families import llama
from bench.contract.families.family import ConfigJson, Family, Fixed, Unit, Weight
from bench.contract.families.mistral import LLAMA_ONLY
from bench.contract.model import Experts, Model

AUX_LOSS_COEF = 0.001
"""What transformers writes if a model has no load-balancing loss, and takes where the key is missing."""


def aux_loss_coef(config: ConfigJson) -> float:
    """Return the coefficient of the load-balancing loss, which transformers adds only with output_router_logits."""
    if not config.flag("output_router_logits", default=False):
        return 0.0
    return config.number("router_aux_loss_coef", AUX_LOSS_COEF)


def aux_loss_settings(experts: Experts) -> dict[str, Any]:
    """Return the keys of config.json for the load-balancing loss."""
    coefficient = experts.aux_loss_coef
    return {"output_router_logits": coefficient > 0, "router_aux_loss_coef": coefficient or AUX_LOSS_COEF}


def experts_of(m: Model) -> Experts:
    """Return the experts of a model of a family that always has them."""
    assert m.experts is not None, f"{m.name} has no experts"
    return m.experts


def expert_weights(m: Model, i: int, *, near: str, names: Sequence[str]) -> Iterator[Weight]:
    """Yield the router and the experts of a layer.

    near: the prefix of their names in transformers; names: those of an expert's gate, up and down projections.
    """
    h, f, far, (gate, up, down) = m.hidden_size, m.mlp_size, "decoder.layers.mlp.", names
    pieces, num_experts = gcd(llama.PIECES, f), experts_of(m).num_experts
    yield Weight(f"{far}router.weight", i, {f"{near}gate.weight": (num_experts, h)})
    for n in range(num_experts):
        gates = {f"{near}experts.{n}.{name}.weight": (f, h) for name in (gate, up)}
        yield Weight(f"{far}experts.experts.linear_fc1.weight", i, gates, 0, 2 * pieces, expert=n)
        yield Weight(
            f"{far}experts.experts.linear_fc2.weight",
            *(i, {f"{near}experts.{n}.{down}.weight": (h, f)}, 1, pieces),
            expert=n,
        )


def _model_of(config: ConfigJson, **names: Any) -> Model:
    defaults = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
    with_defaults = ConfigJson(defaults | dict(config.values), config.where)
    experts = Experts(
        num_experts=config.count("num_local_experts", 8),
        experts_per_token=config.count("num_experts_per_tok", 2),
        ffn_hidden_size=config.count("intermediate_size"),
        aux_loss_coef=aux_loss_coef(config),
    )
    return llama.sizes(with_defaults, family="mixtral", experts=experts, **names)


def _config_of(m: Model) -> dict[str, Any]:
    shared = {key: value for key, value in llama.config_of(m).items() if key not in LLAMA_ONLY}
    experts = experts_of(m)
    return shared | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": m.mlp_size,
        "sliding_window": None,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "router_jitter_noise": 0.0,
        **aux_loss_settings(experts),
    }


def _mlp(m: Model, i: int) -> Iterator[Weight]:
    return expert_weights(m, i, near=f"model.layers.{i}.block_sparse_moe.", names=("w1", "w3", "w2"))


def _units(model: Model, *, fused: bool) -> list[Unit]:
    return llama.units(model, fused=fused, mlp=_mlp)


def _has_layers_of(m: Model) -> bool:
    is_normalised = m.experts is not None and m.experts.normalize_top_k
    return llama.has_rotary_layers(m) and is_normalised and not (m.qkv_bias or m.qk_norm)


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    fixed=(llama.ACTIVATION, Fixed("sliding_window", None, (None,)), Fixed("router_jitter_noise", 0.0, (0, 0.0))),
    refused=llama.refused_rope,
    has_layers_of=_has_layers_of,
    model_of=_model_of,
    config_of=_config_of,
    units=_units,
)
