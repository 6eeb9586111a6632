"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP of every layer.

Source: transformers 5.23, Qwen3MoeConfig and Qwen3MoeTopKRouter.
"""

from collections.abc import Iterator
from typing import Any

from bench.contract.families import llama, mixtral, qwen2
from bench.contract.families.family import ConfigJson, Family, Fixed, Unit, Weight
from bench.contract.families.mixtral import experts_of
from bench.contract.model import Experts, Model


def _model_of(config: ConfigJson, **names: Any) -> Model:
    defaults = {"num_key_value_heads": 4, "intermediate_size": 6144, "max_position_embeddings": 32768}
    with_defaults = ConfigJson(defaults | dict(config.values), config.where)
    experts = Experts(
        num_experts=config.count("num_experts", config.count("num_local_experts", 128)),
        experts_per_token=config.count("num_experts_per_tok", 8),
        ffn_hidden_size=config.count("moe_intermediate_size", 768),
        normalize_top_k=config.flag("norm_topk_prob", default=False),
        aux_loss_coef=mixtral.aux_loss_coef(config),
    )
    return llama.sizes(with_defaults, family="qwen3_moe", qk_norm=True, experts=experts, **names)


def _config_of(m: Model) -> dict[str, Any]:
    shared = {key: value for key, value in llama.config_of(m).items() if key != "mlp_bias"}
    experts = experts_of(m)
    return shared | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": m.head_size,
        "use_sliding_window": False,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": m.mlp_size,
        "norm_topk_prob": experts.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        **mixtral.aux_loss_settings(experts),
    }


def _mlp(m: Model, i: int) -> Iterator[Weight]:
    names = ("gate_proj", "up_proj", "down_proj")
    return mixtral.expert_weights(m, i, near=f"model.layers.{i}.mlp.", names=names)


def _units(model: Model, *, fused: bool) -> list[Unit]:
    return llama.units(model, fused=fused, mlp=_mlp)


FAMILY = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    fixed=(
        *(llama.ACTIVATION, qwen2.WINDOW, Fixed("attention_bias", False, (False,))),
        *(Fixed("decoder_sparse_step", 1, (1,)), Fixed("mlp_only_layers", None, (None, []))),
    ),
    refused=qwen2.refused,
    has_layers_of=lambda m: llama.has_rotary_layers(m) and m.qk_norm and bool(m.experts) and not m.qkv_bias,
    model_of=_model_of,
    config_of=_config_of,
    units=_units,
)
