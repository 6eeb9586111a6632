"""The operations of generation: the interface, and its implementation in torch.

The torch implementation uses the operations of training and torch's GEMMs; it is for prompts, CPUs and FP32. On a GPU
few rows use Triton kernels (`gpu_ops`).

Shape letters: M rows, B slots, H hidden, I and O input and output of a linear, F width of the MLP, G query groups,
T tokens of a slot, D head dimension.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bench.contract.generation import Sampling
from jobs.engines.megatron.generation.kv_cache import KvCache
from jobs.engines.megatron.generation.ranks import Ranks
from jobs.engines.megatron.generation.sampling import next_tokens
from jobs.engines.megatron.generation.weights import Linear
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.trained.ops import NormWeights, TrainedOps


class GenerationOps(Protocol):
    """The operations. Sums are in FP32; results are in the data type of the activations unless documented otherwise."""

    def own_rows(self, tokens_M: Tensor, table_VH: Tensor, first: int) -> Tensor:
        """Return the rows [M, H] of tokens in a TP rank's part of the embedding; 0 for the tokens of other ranks.

        first: the token of the first row.
        """

    def linear(
        self, x_MI: Tensor, weight: Linear, *, norm: NormWeights | None = None, residual_MO: Tensor | None = None
    ) -> Tensor:
        """Return residual + weight norm(x) [M, O]; without a norm: residual + weight x."""

    def logits(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        """Return weight norm(x) [M, O] in FP32."""

    def gated(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        """Return silu(gate) * up [M, F], for the gates and ups weight norm(x); gates are the first half."""

    def attend(
        self,
        qkv_BO: Tensor,
        keys_BGTD: Tensor,
        values_BGTD: Tensor,
        positions_B: Tensor,
        angles_TD: Tensor,
        *,
        bias_O: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Return the attention output [B, O] of one new token per slot.

        Its key and value are written to the cache, and it attends to all tokens up to itself. The bias is added to qkv;
        then the norms normalise its queries and its key, and RoPE rotates them by the angles of its position.
        """

    def append(self, logits_BV: Tensor, cache: KvCache, sampling: Sampling, ranks: Ranks) -> None:
        """Sample the next token of every slot from logits [B, V] of this rank's vocabulary, and append it."""


@dataclass(frozen=True)
class TorchOps:
    """`GenerationOps` in torch."""

    trained: TrainedOps

    def own_rows(self, tokens_M: Tensor, table_VH: Tensor, first: int) -> Tensor:
        own_M = tokens_M - first
        is_own_M = (own_M >= 0) & (own_M < len(table_VH))
        return table_VH[own_M.clamp(0, len(table_VH) - 1)] * is_own_M[:, None]

    def linear(
        self, x_MI: Tensor, weight: Linear, *, norm: NormWeights | None = None, residual_MO: Tensor | None = None
    ) -> Tensor:
        y_MO = weight.product(self._normed(x_MI, norm))
        return y_MO if residual_MO is None else y_MO.add_(residual_MO)

    def logits(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        return self.linear(x_MI, weight, norm=norm).float()

    def gated(self, x_MI: Tensor, weight: Linear, norm: NormWeights) -> Tensor:
        return self.trained.swiglu(self.linear(x_MI, weight, norm=norm))[0].values

    def attend(
        self,
        qkv_BO: Tensor,
        keys_BGTD: Tensor,
        values_BGTD: Tensor,
        positions_B: Tensor,
        angles_TD: Tensor,
        *,
        bias_O: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        slots_B, (_, groups, capacity, dim) = torch.arange(len(qkv_BO), device=qkv_BO.device), keys_BGTD.shape
        q, k, v = self.trained.split_heads(qkv_BO, bias_O, angles_TD[positions_B], groups, dim, norms)
        keys_BGTD[slots_B, :, positions_B], values_BGTD[slots_B, :, positions_B] = k, v
        is_seen_BT = torch.arange(capacity, device=qkv_BO.device) <= positions_B[:, None]
        out_BN1D = scaled_dot_product_attention(
            q[:, :, None], keys_BGTD, values_BGTD, attn_mask=is_seen_BT[:, None, None], enable_gqa=True
        )
        return out_BN1D.flatten(1)

    def append(self, logits_BV: Tensor, cache: KvCache, sampling: Sampling, ranks: Ranks) -> None:
        cache.append(next_tokens(logits_BV, sampling, ranks, cache.seeds_B, cache.positions_B + 1))

    def _normed(self, x_MI: Tensor, norm: NormWeights | None) -> Tensor:
        return x_MI if norm is None else self.trained.norm(x_MI, norm)[0].values
