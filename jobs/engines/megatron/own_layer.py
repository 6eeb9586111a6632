"""What both hand-written layers share: megatron-core's parts, and the options of their passes."""

from typing import Any

import torch
from megatron.core.transformer import TransformerLayer


class OwnLayer(TransformerLayer):
    """megatron-core's layer, its parts and their names, with a forward and a backward pass of our own.

    ops: the operations that it computes with.
    recompute_qkv, recompute_fc1: their outputs are not saved, but computed again in the backward pass.
    """

    def __init__(self, *args, ops: Any, recompute_qkv: bool = False, recompute_fc1: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.ops = ops
        self.recompute_qkv, self.recompute_fc1 = recompute_qkv, recompute_fc1

    @property
    def backward_linears(self) -> list[torch.nn.Module]:
        """The linears, in the order in which the backward pass needs their weights."""
        return [self.mlp.linear_fc2, self.mlp.linear_fc1, self.proj, self.qkv]

    @property
    def qkv(self):
        return self.self_attention.linear_qkv

    @property
    def proj(self):
        return self.self_attention.linear_proj
