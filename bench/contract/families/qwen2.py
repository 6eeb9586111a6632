"""Qwen2 and Qwen2.5: Llama with biases on q, k and v.

Source: transformers 5.23, Qwen2Config and Qwen2Attention.
"""

from typing import Any

from bench.contract.families import llama
from bench.contract.families.family import ConfigJson, Family, Fixed
from bench.contract.families.mistral import LLAMA_ONLY
from bench.contract.model import Model

WINDOW = Fixed("use_sliding_window", False, (False,))
"""sliding_window and max_window_layers have no meaning without it."""


def refused(config: ConfigJson) -> list[str]:
    """Return the kinds of layers and of RoPE that our layers do not have, as clauses."""
    kinds = sorted(set(config.values.get("layer_types") or ()) - {"full_attention"})
    wrong = [f"layer_types has {', '.join(map(str, kinds))} (supported: full_attention)"] if kinds else []
    return wrong + llama.refused_rope(config)


def with_defaults(config: ConfigJson) -> ConfigJson:
    """Return a config.json with the defaults of Qwen2 and Qwen3 that differ from Llama's."""
    return ConfigJson({"max_position_embeddings": 32768, "num_key_value_heads": 32} | dict(config.values), config.where)


def _model_of(config: ConfigJson, **names: Any) -> Model:
    return llama.sizes(with_defaults(config), family="qwen2", qkv_bias=True, **names)


def _config_of(m: Model) -> dict[str, Any]:
    shared = {key: value for key, value in llama.config_of(m).items() if key not in LLAMA_ONLY}
    return shared | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    fixed=(llama.ACTIVATION, WINDOW),
    refused=refused,
    has_layers_of=lambda m: llama.has_rotary_layers(m) and m.qkv_bias and not (m.qk_norm or m.experts),
    model_of=_model_of,
    config_of=_config_of,
    units=llama.units,
)
