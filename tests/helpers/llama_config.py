"""The Llama of a model of ours, as transformers describes it."""

from typing import Any

from transformers import LlamaConfig

from bench.contract.model import Model


def llama_config(model: Model, **others: Any) -> LlamaConfig:
    """Return the config of this shape; `others` say what its positions are."""
    return LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        rms_norm_eps=model.norm_epsilon,
        **others,
    )
