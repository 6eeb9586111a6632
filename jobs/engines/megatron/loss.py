"""Cross-entropy of logits that TP splits along the vocabulary: one pass forward, one backward, and no FP32 copy.

Shape letters: M tokens (S * B), V this TP rank's part of the vocabulary.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd import Function


def cross_entropy(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Return -log softmax(logits)[label] of each token [M] in FP32; the backward pass overwrites the logits.

    Labels are indices into the whole vocabulary, whose parts the TP ranks hold in order.
    """
    return _CrossEntropy.apply(logits_MV, labels_M)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        labels_M = labels_M - group.rank() * logits_MV.shape[1]
        lse_M, picked_M = _ops(logits_MV).forward(logits_MV, labels_M)
        if group.size() > 1:
            most_M = lse_M.clone()
            torch.distributed.all_reduce(most_M, torch.distributed.ReduceOp.MAX, group=group)
            sums = torch.stack([(lse_M - most_M).exp(), picked_M])
            torch.distributed.all_reduce(sums, group=group)
            lse_M, picked_M = most_M + sums[0].log(), sums[1]
        ctx.logits_MV, ctx.labels_M, ctx.lse_M = logits_MV, labels_M, lse_M
        return lse_M - picked_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor):
        logits_MV, ctx.logits_MV = ctx.logits_MV, None
        _ops(logits_MV).backward_(logits_MV, ctx.labels_M, ctx.lse_M, grad_M.contiguous())
        return logits_MV, None


def _ops(logits_MV: Tensor) -> Any:
    """Return what computes the loss on the device of the logits: the Triton kernels or torch."""
    if not logits_MV.is_cuda:
        return _TorchOps
    from jobs.engines.megatron import loss_kernels

    return loss_kernels


class _TorchOps:
    """The functions of `loss_kernels` in plain torch."""

    @staticmethod
    def forward(logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return log sum exp [M] and the label's logit [M]; for labels outside of this part of the vocabulary, 0."""
        inside_M = (labels_M >= 0) & (labels_M < logits_MV.shape[1])
        picked_M = logits_MV.gather(1, torch.where(inside_M, labels_M, 0)[:, None])[:, 0].float()
        return logits_MV.float().logsumexp(1), torch.where(inside_M, picked_M, 0)

    @staticmethod
    def backward_(logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, grad_M: Tensor) -> None:
        """Overwrite the logits with their gradient."""
        column_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
        hit_MV = column_V == labels_M[:, None]
        logits_MV.copy_((torch.exp(logits_MV.float() - lse_M[:, None]) - hit_MV.float()) * grad_M[:, None])
