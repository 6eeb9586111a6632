"""Mistral: the layers of Llama. The sliding window of version 0.1 is refused: our attention has none.

Source: transformers 5.23, MistralConfig.
"""

from typing import Any

from bench.contract.families import llama
from bench.contract.families.family import ConfigJson, Family, Fixed
from bench.contract.model import Model

LLAMA_ONLY = ("attention_bias", "mlp_bias")
"""Keys that Llama has, and Mistral and Qwen2 do not."""


def _model_of(config: ConfigJson, **names: Any) -> Model:
    values = {"max_position_embeddings": 131072, "num_key_value_heads": 8} | dict(config.values)
    return llama.sizes(ConfigJson(values, config.where), family="mistral", **names)


def _config_of(m: Model) -> dict[str, Any]:
    shared = {key: value for key, value in llama.config_of(m).items() if key not in LLAMA_ONLY}
    own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "head_dim": m.head_size}
    return shared | own | {"sliding_window": None}


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    fixed=(llama.ACTIVATION, Fixed("sliding_window", 4096, (None,))),
    refused=llama.refused_rope,
    has_layers_of=llama.FAMILY.has_layers_of,
    model_of=_model_of,
    config_of=_config_of,
    units=llama.units,
)
