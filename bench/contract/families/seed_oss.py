"""Seed-OSS: Llama with biases on q, k and v, and a head size of its own.

Source: transformers 5.23, SeedOssConfig and SeedOssAttention.
"""

from typing import Any

from bench.contract.families import llama
from bench.contract.families.family import ConfigJson, Family, Fixed
from bench.contract.model import Model


def _model_of(config: ConfigJson, **names: Any) -> Model:
    defaults = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
    with_defaults = ConfigJson(defaults | dict(config.values), config.where)
    return llama.sizes(with_defaults, family="seed_oss", qkv_bias=True, **names)


def _config_of(m: Model) -> dict[str, Any]:
    """Return the config.json. transformers has dropout by default, and a padding token without gradients."""
    return llama.config_of(m) | {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "head_dim": m.head_size,
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "pad_token_id": None,
    }


FAMILY = Family(
    name="seed_oss",
    model_types=("seed_oss",),
    fixed=(
        *(llama.ACTIVATION, Fixed("attention_bias", True, (True,))),
        *(Fixed("attention_out_bias", False, (False,)), Fixed("mlp_bias", False, (False,))),
    ),
    refused=llama.refused_rope,
    has_layers_of=lambda m: llama.has_rotary_layers(m) and m.qkv_bias and not (m.qk_norm or m.experts),
    model_of=_model_of,
    config_of=_config_of,
    units=llama.units,
)
