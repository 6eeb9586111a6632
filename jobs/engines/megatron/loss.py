"""Vocabulary-parallel cross-entropy: one pass over the logits forward, one backward, and no FP32 copy of them.

With an FP8 head (`fp8.head`) the backward pass returns the gradient of the logits in FP8.

Shape letters: M tokens (S * B), V this TP rank's part of the vocabulary.
"""

from typing import Any, NamedTuple, Protocol

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.autograd import Function

from jobs.engines.megatron.quantize import FP8, LARGEST, SMALLEST_AMAX, Quantized


def cross_entropy(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Return -log softmax(logits)[label] of each token [M] in FP32; the backward pass overwrites the logits.

    Labels are indices into the full vocabulary; the TP ranks hold its parts in order.
    """
    losses_M: Tensor = _CrossEntropy.apply(logits_MV, labels_M)  # type: ignore[no-untyped-call]  # torch's
    return losses_M


class Statistics(NamedTuple):
    """What the backward pass needs for each token in addition to its logits."""

    labels_M: Tensor
    """Indices into this TP rank's part of the vocabulary; labels of other ranks' parts are out of range."""
    lse_M: Tensor
    """Log-sum-exp of all logits, in FP32."""
    picked_M: Tensor
    """The logit of the label, in FP32."""

    @property
    def losses_M(self) -> Tensor:
        return self.lse_M - self.picked_M


def statistics(logits_MV: Tensor, labels_M: Tensor) -> Statistics:
    """Return the statistics over the full vocabulary."""
    group = parallel_state.get_tensor_model_parallel_group()
    labels_M = labels_M - group.rank() * logits_MV.shape[1]
    lse_M, picked_M = _ops(logits_MV).forward(logits_MV, labels_M)
    if group.size() > 1:
        most_M = lse_M.clone()
        torch.distributed.all_reduce(most_M, torch.distributed.ReduceOp.MAX, group=group)
        sums = torch.stack([(lse_M - most_M).exp(), picked_M])
        torch.distributed.all_reduce(sums, group=group)
        lse_M, picked_M = most_M + sums[0].log(), sums[1]
    return Statistics(labels_M, lse_M, picked_M)


def quantized_gradient(logits_MV: Tensor, stats: Statistics, grad_M: Tensor, *, dtype: torch.dtype = FP8) -> Quantized:
    """Return the gradient of the logits in FP8, from the gradients of the losses; the logits are not changed.

    The largest magnitude of a row is at its label, 1 - p, because the probabilities of all other tokens sum to 1 - p.
    So each row's scale is stats before the row is read, and it is the same on all TP ranks.
    """
    return _ops(logits_MV).quantized_gradient(logits_MV, stats, grad_M.contiguous(), dtype)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        ctx.logits_MV, ctx.stats = logits_MV, statistics(logits_MV, labels_M)
        losses_M: Tensor = ctx.stats.losses_M
        return losses_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor) -> tuple[Tensor, None]:
        logits_MV, ctx.logits_MV = ctx.logits_MV, None
        _ops(logits_MV).backward_(logits_MV, ctx.stats.labels_M, ctx.stats.lse_M, grad_M.contiguous())
        return logits_MV, None


class _Ops(Protocol):
    """`_TorchOps`, or the module `loss_kernels`."""

    def forward(self, logits_MV: Tensor, labels_M: Tensor, /) -> tuple[Tensor, Tensor]: ...

    def backward_(self, logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, grad_M: Tensor, /) -> None: ...

    def quantized_gradient(
        self, logits_MV: Tensor, stats: Statistics, grad_M: Tensor, dtype: torch.dtype, /
    ) -> Quantized: ...


def _ops(logits_MV: Tensor) -> _Ops:
    """Return the implementation for the device of the logits: Triton kernels or torch."""
    if not logits_MV.is_cuda:
        return _TorchOps
    from jobs.engines.megatron import loss_kernels

    return loss_kernels


class _TorchOps:
    """The functions of `loss_kernels` in plain torch."""

    @staticmethod
    def forward(logits_MV: Tensor, labels_M: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-sum-exp [M] and the logit of the label [M]; 0 for labels of other parts of the vocabulary."""
        inside_M = (labels_M >= 0) & (labels_M < logits_MV.shape[1])
        picked_M = logits_MV.gather(1, torch.where(inside_M, labels_M, 0)[:, None])[:, 0].float()
        return logits_MV.float().logsumexp(1), torch.where(inside_M, picked_M, 0)

    @staticmethod
    def backward_(logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor, grad_M: Tensor) -> None:
        """Overwrite the logits with their gradient."""
        logits_MV.copy_(_TorchOps.gradient(logits_MV, labels_M, lse_M) * grad_M[:, None])

    @staticmethod
    def quantized_gradient(logits_MV: Tensor, stats: Statistics, grad_M: Tensor, dtype: torch.dtype) -> Quantized:
        """Return the gradient of the logits in `dtype`, with the scales that `loss.quantized_gradient` describes."""
        scale_M = (-torch.expm1(-stats.losses_M) * grad_M.abs()).clamp(min=SMALLEST_AMAX) / LARGEST
        grad_MV = _TorchOps.gradient(logits_MV, stats.labels_M, stats.lse_M) * (grad_M / scale_M)[:, None]
        return Quantized(grad_MV.clamp(-LARGEST, LARGEST).to(dtype), scale_M)

    @staticmethod
    def gradient(logits_MV: Tensor, labels_M: Tensor, lse_M: Tensor) -> Tensor:
        """Return the gradient of each token's own loss, in FP32."""
        column_V = torch.arange(logits_MV.shape[1], device=logits_MV.device)
        hit_MV = column_V == labels_M[:, None]
        return torch.exp(logits_MV.float() - lse_M[:, None]) - hit_MV.float()
