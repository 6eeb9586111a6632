"""One tiny config of transformers for each model family: the parametrised tests of families run with every entry."""

from collections.abc import Callable
from typing import Any

import transformers

from bench.contract import families
from bench.contract.model import Model
from helpers.tiny_llama import VOCABULARY

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 131072,
    "initializer_range": 0.15,
}
"""Heads of 32, as small as attention kernels take them; weights so large that greedy tokens do not repeat at once."""
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}


def _rope(base: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


TINY: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "smollm": lambda: transformers.LlamaConfig(**SIZES, **_rope(100000.0), tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None, head_dim=64),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, **_rope(1e6), tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, **_rope(1e6), head_dim=64),
    "seed_oss": lambda: transformers.SeedOssConfig(**SIZES, **_rope(1e7), head_dim=64),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=128, n_layer=2, n_head=4, n_positions=512, vocab_size=VOCABULARY, activation_function="gelu"
    ),
}
"""Set what the family needs and what its defaults make large. Leave every other default of transformers, such as a
dropout, so that the tests see what runstop makes of it."""


def model(name: str) -> Model:
    """Return what runstop reads from the config of an entry."""
    return families.model_of(TINY[name]().to_dict(), name="tiny", source="made here", where=name)
