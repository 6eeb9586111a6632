"""Qwen3: Llama with a norm on each head of q and of k, and a head size of its own.

Source: transformers 5.23, Qwen3Config and Qwen3Attention.
"""

from typing import Any

from bench.contract.families import llama, qwen2
from bench.contract.families.family import ConfigJson, Family, Fixed
from bench.contract.model import Model


def _model_of(config: ConfigJson, **names: Any) -> Model:
    values = {"head_dim": 128} | dict(qwen2.with_defaults(config).values)
    return llama.sizes(ConfigJson(values, config.where), family="qwen3", qk_norm=True, **names)


def _config_of(m: Model) -> dict[str, Any]:
    shared = {key: value for key, value in llama.config_of(m).items() if key != "mlp_bias"}
    own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": m.head_size}
    return shared | own | {"use_sliding_window": False}


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    fixed=(llama.ACTIVATION, qwen2.WINDOW, Fixed("attention_bias", False, (False,))),
    refused=qwen2.refused,
    has_layers_of=lambda m: llama.has_rotary_layers(m) and m.qk_norm and not (m.qkv_bias or m.experts),
    model_of=_model_of,
    config_of=_config_of,
    units=llama.units,
)
