"""Core attention on torch's scaled_dot_product_attention, with context parallelism by exchange of keys and values.

Shape letters: S sequence on this rank, T whole sequence, B batch, H heads, G key/value groups, D head dimension.
"""

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Attention(torch.nn.Module):
    """Causal attention; megatron-core's interface for `core_attention`."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **_unused):
        super().__init__()
        self.softmax_scale = config.softmax_scale

    def forward(self, query, key, value, attention_mask, **_unused):
        """Return [S, B, H*D] for query [S, B, H, D] and key, value [S, B, G, D]."""
        group = parallel_state.get_context_parallel_group()
        cp = group.size()
        if cp > 1:
            key, value = _GatherSequence.apply(key, group), _GatherSequence.apply(value, group)
        mask = None if cp == 1 else _causal_mask(key.shape[0], cp, group.rank(), query.device)
        q_BHSD, k_BGTD, v_BGTD = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out_BHSD = scaled_dot_product_attention(
            q_BHSD,
            k_BGTD,
            v_BGTD,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=q_BHSD.shape[1] != k_BGTD.shape[1],
        )
        return out_BHSD.permute(2, 0, 1, 3).flatten(2)


def positions(total: int, cp: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Return the positions [total / cp] that a context-parallel rank holds.

    The sequence is cut into 2 * cp chunks and rank r takes chunks r and 2 * cp - 1 - r, so that all ranks have the
    same causal work. Source: megatron-core 0.16.1, get_batch_on_this_cp_rank.
    """
    chunks = torch.arange(total, device=device).view(2 * cp, -1)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def _causal_mask(total: int, cp: int, rank: int, device: torch.device) -> Tensor:
    """Return [S, T], true where a query of this rank may see a key; keys lie in the order of the gather."""
    keys = torch.cat([positions(total, cp, r, device) for r in range(cp)])
    return positions(total, cp, rank, device)[:, None] >= keys[None, :]


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence; gradients are summed over the ranks and each takes its own part."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = torch.empty(group.size() * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
        torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = torch.empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:], dtype=grad.dtype, device=grad.device)
        torch.distributed.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
