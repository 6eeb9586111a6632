"""Norms of single heads, as in Qwen3: each head of q and of k is normalised (RMSNorm) before RoPE rotates it.

A hand-written layer keeps qkv as the norms read it, not q and k after RoPE: dividing by the norm's weights, to get back
from one to the other, would lose the gradient of a weight near 0.

Shape letters: D head dimension.
"""

from typing import Any, NamedTuple

from torch import Tensor


class HeadNorms(NamedTuple):
    """The weights [D] of both norms, which all heads of q and all heads of k share, and their epsilon."""

    q_D: Tensor
    k_D: Tensor
    eps: float


class HeadNormGradients(NamedTuple):
    """The gradients [D] of both weights over this rank's heads, in FP32."""

    q_D: Tensor
    k_D: Tensor


def head_norms(attention: Any, eps: float) -> HeadNorms | None:
    """Return the norms of megatron-core's attention; None if the model has none."""
    if attention.q_layernorm is None:
        return None
    return HeadNorms(attention.q_layernorm.weight, attention.k_layernorm.weight, eps)
