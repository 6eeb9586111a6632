"""Which module of megatron-core's model is which part of a profile."""

from collections.abc import Iterable, Iterator

import torch

from bench.contract.modules import Part

PARTS = {
    "embedding": Part.embedding,
    "rotary_pos_emb": Part.rope,
    "input_layernorm": Part.norm,
    "pre_mlp_layernorm": Part.norm,
    "final_layernorm": Part.norm,
    "self_attention": Part.rope,
    "linear_qkv": Part.qkv,
    "core_attention": Part.attention,
    "linear_proj": Part.output,
    "mlp": Part.activation,
    "linear_fc1": Part.fc1,
    "linear_fc2": Part.fc2,
    "output_layer": Part.head,
}
"""By a module's name. What a module does outside of those inside it is its own: heads and RoPE of self_attention."""


def parts_of(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, Part]]:
    """Yield the modules that are a part of their own; a layer adds residuals outside of those inside it."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            parent, _, own = name.rpartition(".")
            if own in PARTS:
                yield module, PARTS[own]
            elif parent.endswith("layers") and own.isdigit():
                yield module, Part.residual
