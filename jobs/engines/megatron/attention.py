"""Causal attention by fused kernels, with explicit forward and backward passes and context parallelism (CP).

Under CP the sequence is cut into 2 * cp chunks and a rank holds two of them, one early and one late (see `positions`).
The queries of a chunk attend to the chunk's own keys under the causal mask, and to all earlier keys without a mask:
two kernel calls, merged by their log-sum-exp (lse). The keys and values of all ranks are gathered while the first call
runs, and again in the backward pass. There each of the two calls gets the merged output and lse, so that it returns its
exact part of the gradients.

Shape letters: S sequence on this rank, C one chunk of it, T whole sequence, B batch, H heads, G key/value groups,
D head dimension, N documents of a micro-batch.

With a document mask (`documents`) a token attends only to earlier tokens of its own document. In BF16 on a GPU one
call of torch's FlashAttention for variable lengths computes all documents; its rows are tokens, batch by batch, so
that micro-batches of several rows are copied. Otherwise each document is one call of the kernel without a mask.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

_aten = torch.ops.aten


class Attention(torch.nn.Module):
    """megatron-core's interface for `core_attention`."""

    def __init__(
        self,
        config: "TransformerConfig",
        layer_number: int,
        attn_mask_type: "AttnMaskType",
        attention_type: str,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.scale = config.softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSeqParams | None = None,
        **_unused: Any,
    ) -> Tensor:
        """Return [S, B, H*D] for query [S, B, H, D] and key, value [S, B, G, D]."""
        group = parallel_state.get_context_parallel_group()
        out_SBHD: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]  # torch's
            query, key, value, self.scale, group, packed_seq_params
        )
        return out_SBHD.flatten(2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        group: ProcessGroup,
        documents: PackedSeqParams | None,
    ) -> Tensor:
        out, lse = attend(q, k, v, scale=scale, group=group, documents=documents)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"scale": scale, "group": group, "documents": documents}
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return *attend_backward(dout, *ctx.saved_tensors, **ctx.options), None, None, None


def packed_seq_params(lengths_N: Tensor, device: torch.device | int) -> PackedSeqParams:
    """Return megatron-core's description of documents in rows one after another; their lengths are in host memory.

    No row's documents continue in the next row. The layout stays [S, B, ...], not `thd`, so that megatron-core passes
    the description to attention and does nothing else with it.
    """
    ends_N1 = torch.nn.functional.pad(lengths_N.cumsum(0), (1, 0)).to(torch.int32).to(device, non_blocking=True)
    longest = int(lengths_N.max())
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=ends_N1,
        cu_seqlens_kv=ends_N1,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def attend(
    q_SBHD: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    *,
    scale: float,
    group: ProcessGroup,
    documents: PackedSeqParams | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [S, B, H, D] and its lse, which `attend_backward` needs; group: the CP ranks.

    The lse is in FP32, with the natural logarithm, in the kernel's layout: [B, H, S, 1] (cuDNN), [B, H, S padded to 32]
    (CUDA in FP32) or [B, H, S] (CPU). Under CP the lse of the two chunks are stacked: [2, B, H, C, ...]. With documents
    it is [H, B * S] (FlashAttention) or [B, H, S]; CP is not supported.
    """
    if documents is not None:
        assert group.size() == 1, "the plan refuses CP with a document mask"
        forward = _forward_varlen if _is_cudnn(q_SBHD) else _forward_by_document
        return forward(q_SBHD, k_SBGD, v_SBGD, scale, documents)
    if group.size() == 1:
        return _forward(q_SBHD, k_SBGD, v_SBGD, scale, causal=True)
    gathering, kv = _start_gather(k_SBGD, v_SBGD, group)
    chunks = list(zip(q_SBHD.chunk(2), k_SBGD.chunk(2), v_SBGD.chunk(2), strict=True))
    parts = [_forward(*chunk, scale, causal=True) for chunk in chunks]
    gathering.wait()
    k_TBGD, v_TBGD = _in_sequence(kv, group.size()).chunk(2, dim=2)
    for i, past in enumerate(_num_past(len(q_SBHD), group)):
        if past:
            before = _forward(chunks[i][0], k_TBGD[:past], v_TBGD[:past], scale, causal=False)
            parts[i] = _merge(*parts[i], *before)
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs), torch.stack(lses)


def attend_backward(
    dout_SBHD: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    group: ProcessGroup,
    documents: PackedSeqParams | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q [S, B, H, D] and of k and v [S, B, G, D] of this rank; out and lse: from `attend`.

    The gradients of k and v are summed over the ranks in their own dtype. In BF16 this rounds a sum of at most 2 * cp
    terms, which the kernels have rounded already, and sends half the bytes of FP32.
    """
    if documents is not None:
        backward = _backward_varlen if _is_cudnn(q) else _backward_by_document
        return backward(dout_SBHD, q, k, v, out, lse, scale, documents)
    dout_SBHD = dout_SBHD.contiguous()  # torch's key for cuDNN's cached plan ignores the strides of dout
    if group.size() == 1:
        return _backward(dout_SBHD, q, k, v, out, lse, scale, causal=True)
    gathering, kv = _start_gather(k, v, group)
    chunks = list(zip(*(x.chunk(2) for x in (dout_SBHD, q, k, v, out)), lse.unbind(), strict=True))
    own = [
        _backward(dout_C, q_C, k_C, v_C, out_C, lse_C, scale, causal=True)
        for dout_C, q_C, k_C, v_C, out_C, lse_C in chunks
    ]
    gathering.wait()
    k_TBGD, v_TBGD = _in_sequence(kv, group.size()).chunk(2, dim=2)
    dkv = torch.zeros_like(kv)
    dk_TBGD, dv_TBGD = dkv.chunk(2, dim=2)
    for i, past in enumerate(_num_past(len(q), group)):
        if past:
            dout_C, q_C, _, _, out_C, lse_C = chunks[i]
            dq, dk, dv = _backward(dout_C, q_C, k_TBGD[:past], v_TBGD[:past], out_C, lse_C, scale, causal=False)
            own[i][0].add_(dq)
            dk_TBGD[:past].add_(dk)
            dv_TBGD[:past].add_(dv)
    dk_SBGD, dv_SBGD = _reduce_scatter(dkv, group).chunk(2, dim=2)
    dq_SBHD, dk_own, dv_own = (torch.cat(grads) for grads in zip(*own, strict=True))
    return dq_SBHD, dk_own.add_(dk_SBGD), dv_own.add_(dv_SBGD)


def positions(total: int, cp: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Return the positions [total / cp] that a context-parallel rank holds.

    The sequence is cut into 2 * cp chunks and rank r takes chunks r and 2 * cp - 1 - r, so that all ranks have the
    same causal work. Source: megatron-core 0.16.1, get_batch_on_this_cp_rank.
    """
    chunks = torch.arange(total, device=device).view(2 * cp, -1)
    return torch.cat([chunks[chunk] for chunk in _held_chunks(cp, rank)])


def _held_chunks(cp: int, rank: int) -> tuple[int, int]:
    return rank, 2 * cp - 1 - rank


def _num_past(num_own: int, group: ProcessGroup) -> list[int]:
    """Return the number of tokens before each of the two chunks of this rank."""
    return [chunk * num_own // 2 for chunk in _held_chunks(group.size(), group.rank())]


def _start_gather(k_SBGD: Tensor, v_SBGD: Tensor, group: ProcessGroup) -> tuple[torch.distributed.Work, Tensor]:
    """Start to gather keys and values; return the collective and its output [T, B, 2*G, D], rank by rank."""
    own = torch.cat([k_SBGD, v_SBGD], dim=2)
    gathered = own.new_empty(group.size() * len(own), *own.shape[1:])
    return torch.distributed.all_gather_into_tensor(gathered, own, group=group, async_op=True), gathered


def _reduce_scatter(x_TBGD: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's part [S, B, G, D] of the sum over the ranks; each rank passes the full sequence in order."""
    chunks, cp = x_TBGD.chunk(2 * group.size()), group.size()
    by_rank = torch.cat([chunks[chunk] for rank in range(cp) for chunk in _held_chunks(cp, rank)])
    own = by_rank.new_empty(len(by_rank) // cp, *by_rank.shape[1:])
    torch.distributed.reduce_scatter_tensor(own, by_rank, group=group)
    return own


def _in_sequence(x_TBGD: Tensor, cp: int) -> Tensor:
    """Reorder chunks from rank order to sequence order."""
    chunks = x_TBGD.chunk(2 * cp)
    return torch.cat(chunks[::2] + chunks[::-2])


def _merge(out_CBHD: Tensor, lse: Tensor, other_CBHD: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse of the softmax over both sets of keys."""
    weight_BHC = torch.sigmoid(other_lse - lse).flatten(2)[:, :, : len(out_CBHD)]
    weight_CBH1 = weight_BHC.permute(2, 0, 1).unsqueeze(3)
    merged = torch.lerp(out_CBHD.float(), other_CBHD.float(), weight_CBH1)
    return merged.to(out_CBHD.dtype), torch.logaddexp(lse, other_lse)


def _forward(q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Return output and lse of one kernel call; without the causal mask there may be more keys than queries."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHD, k_SBGD, v_SBGD))
    if _is_cudnn(q):
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
        return out.permute(2, 0, 1, 3), lse
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if q.is_cuda:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.permute(2, 0, 1, 3), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; if out and lse cover more keys than k, the contribution of these keys."""
    num_groups = k.shape[2]
    dout, q, k, v, out = (x.permute(1, 2, 0, 3) for x in (dout, q, k, v, out))
    no_seed = torch.empty((), dtype=torch.long, device=q.device)  # for dropout, which is 0
    if _is_cudnn(q):
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, no_seed, no_seed, None, *lengths, 0.0, causal, scale=scale
        )
        dq, dk, dv = grads
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if q.is_cuda:
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the only layout that the kernel accepts
        grad_input_mask = (True, True, True, False)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, no_seed, no_seed, 0.0, grad_input_mask, causal, scale=scale
        )
    else:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    dk, dv = (x.unflatten(1, (num_groups, -1)).sum(2) for x in (dk, dv))
    return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


def _forward_varlen(
    q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, scale: float, documents: PackedSeqParams
) -> tuple[Tensor, Tensor]:
    """Return output and lse [H, B * S] of all documents by one call of FlashAttention, which supports GQA."""
    qkv = (_batch_first(x) for x in (q_SBHD, k_SBGD, v_SBGD))
    out, lse, *_ = _aten._flash_attention_forward(*qkv, *_varlen(documents), 0.0, True, False, scale=scale)
    return _sequence_first(out, q_SBHD.shape[1]), lse


def _backward_varlen(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, documents: PackedSeqParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the output and the lse of `_forward_varlen`."""
    tensors = (_batch_first(x) for x in (dout, q, k, v, out))
    no_seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # for dropout, which is 0
    unused = torch.empty(0, device=q.device)
    grads = _aten._flash_attention_backward(*tensors, lse, *_varlen(documents), 0.0, True, no_seed, unused, scale=scale)
    dq, dk, dv = (_sequence_first(x, q.shape[1]) for x in grads)
    return dq, dk, dv


def _varlen(documents: PackedSeqParams) -> tuple[Tensor, Tensor, int, int]:
    """Return the arguments of FlashAttention that give the documents."""
    return documents.cu_seqlens_q, documents.cu_seqlens_kv, documents.max_seqlen_q, documents.max_seqlen_kv


def _batch_first(x_SBHD: Tensor) -> Tensor:
    """Return the tokens batch by batch [B * S, H, D], a view if B is 1; the kernel needs adjacent elements of D."""
    flat = x_SBHD.transpose(0, 1).flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _sequence_first(x_MHD: Tensor, batch: int) -> Tensor:
    """Return tokens [B * S, H, D] as [S, B, H, D]."""
    by_batch: Tensor = x_MHD.unflatten(0, (batch, -1))
    return by_batch.transpose(0, 1)


def _forward_by_document(
    q_SBHD: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, scale: float, documents: PackedSeqParams
) -> tuple[Tensor, Tensor]:
    """Return output and lse [B, H, S] by one kernel call for each document."""
    length, batch, heads, _ = q_SBHD.shape
    out_SBHD = torch.empty_like(q_SBHD, memory_format=torch.contiguous_format)
    lse_BHS = torch.empty(batch, heads, length, dtype=torch.float32, device=q_SBHD.device)
    for row, tokens in _places(documents, length):
        q, k, v = (x[tokens, row : row + 1] for x in (q_SBHD, k_SBGD, v_SBGD))
        out, lse = _forward(q, k, v, scale, causal=True)
        out_SBHD[tokens, row : row + 1] = out
        lse_BHS[row : row + 1, :, tokens] = lse[:, :, : len(out)]
    return out_SBHD, lse_BHS


def _backward_by_document(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, documents: PackedSeqParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the output and the lse of `_forward_by_document`."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for row, tokens in _places(documents, len(q)):
        whole = (dout, q, k, v, out)
        dout_1, q_1, k_1, v_1, out_1 = (x[tokens, row : row + 1].contiguous() for x in whole)
        lse_BHS = lse[row : row + 1, :, tokens].contiguous()
        if q.is_cuda:  # the kernel's lse is padded to 32, and the weights of the padding are exp(-inf)
            lse_BHS = torch.nn.functional.pad(lse_BHS, (0, -lse_BHS.shape[2] % 32), value=torch.inf)
        grads = _backward(dout_1, q_1, k_1, v_1, out_1, lse_BHS, scale, causal=True)
        for grad, part in zip((dq, dk, dv), grads, strict=True):
            grad[tokens, row : row + 1] = part
    return dq, dk, dv


def _places(documents: PackedSeqParams, length: int) -> Iterator[tuple[int, slice]]:
    """Yield the row and the tokens of each document; this waits for the device."""
    ends = documents.cu_seqlens_q.tolist()
    for start, end in zip(ends, ends[1:], strict=False):
        row = start // length
        yield row, slice(start - row * length, end - row * length)


def _is_cudnn(x: Tensor) -> bool:
    """Return whether cuDNN is used, or FlashAttention with a document mask. Both support GQA; for the other kernels
    keys and values are repeated per head."""
    return x.is_cuda and x.dtype is not torch.float32
