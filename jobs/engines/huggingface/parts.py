"""Which module of transformers' Llama or GPT-2 is which part of a profile."""

from collections.abc import Iterator

from torch.nn import Module

from bench.contract.modules import Part

PARTS = {
    "embed_tokens": Part.embedding,
    "wte": Part.embedding,
    "wpe": Part.embedding,
    "rotary_emb": Part.rope,
    "input_layernorm": Part.norm,
    "post_attention_layernorm": Part.norm,
    "norm": Part.norm,
    "ln_1": Part.norm,
    "ln_2": Part.norm,
    "ln_f": Part.norm,
    "self_attn": Part.attention,
    "attn": Part.attention,
    "q_proj": Part.qkv,
    "k_proj": Part.qkv,
    "v_proj": Part.qkv,
    "c_attn": Part.qkv,
    "o_proj": Part.output,
    "attn.c_proj": Part.output,
    "mlp": Part.activation,
    "gate_proj": Part.fc1,
    "up_proj": Part.fc1,
    "c_fc": Part.fc1,
    "down_proj": Part.fc2,
    "mlp.c_proj": Part.fc2,
    "lora_A": Part.adapters,
    "lora_B": Part.adapters,
    "lm_head": Part.head,
}
"""By the end of a module's name. What a module does outside of those inside it is its own: attention has RoPE too."""


def parts_of(model: Module) -> Iterator[tuple[Module, Part]]:
    """Yield the modules that are a part of their own; a layer adds residuals outside of those inside it."""
    for name, module in model.named_modules():
        words = name.removesuffix(".default").split(".")
        part = PARTS.get(".".join(words[-2:])) or PARTS.get(words[-1])
        if part is not None:
            yield module, part
        elif words[-1].isdigit():
            yield module, Part.residual
