"""The outer optimizer of local SGD, and its weights.

    change = outer - inner, its mean over the groups        the gradient of the outer step
    momentum = mu momentum + change                         torch.optim.SGD with nesterov=True, as in DiLoCo
    outer = outer - rate (change + mu momentum)             the averaged weights, from which each group continues

The outer weights and the momentum are FP32 in host memory. They cover the shard of this rank's master weights, as does
the mean between exchange and step. All arithmetic runs on the device of the inner weights. On a GPU the host tensors
are page-locked and are copied chunk by chunk on its current stream. Adam's moments are not averaged. The mean of
uncompressed weights needs no outer weights.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.contract.local_sgd import Average, Compress, LocalSgd
from jobs.engines.rank_state import host_memory
from jobs.local_sgd.averaging import chunk_size

ChunkIndex = tuple[int, int]
"""The number of a tensor, and the offset of the chunk in it."""


class OuterOptimizer:
    """The outer weights of some flat FP32 tensors, and their optimizer. Chunks are numbered over all tensors."""

    def __init__(self, inner: list[Tensor], local_sgd: LocalSgd) -> None:
        self.inner, self._settings = inner, local_sgd
        self.library: Any = torch.cuda if any(one.is_cuda for one in inner) else torch.cpu
        is_mean = local_sgd.average is Average.parameters
        self.weights = [] if is_mean and local_sgd.compress is Compress.none else on_host(inner)
        has_momentum = self.weights and local_sgd.outer_momentum
        self.momentum = [host_memory(one).zero_() for one in inner] if has_momentum else []
        self._means = [host_memory(one) for one in inner]
        self._copy = [host_memory(one) for one in inner] if local_sgd.overlap_steps else []
        self._chunk = chunk_size(sum(len(one) for one in inner))

    def restart(self) -> None:
        """Copy the inner weights, which are equal in all groups, to the outer weights."""
        for outer, inner in zip(self.weights, self.inner, strict=False):  # there may be no outer weights
            outer.copy_(inner)

    def copy(self) -> list[Tensor]:
        """Return a copy of the inner weights in host memory, valid until the next call; only with `overlap_steps`."""
        return [copy.copy_(inner) for copy, inner in zip(self._copy, self.inner, strict=True)]

    def chunks(self, source: list[Tensor]) -> Iterator[Tensor]:
        """Yield what the groups exchange: the change of the weights, or the weights if there are no outer weights."""
        for index in self._indices():
            chunk = self._on_device(source, index)
            yield self._on_device(self.weights, index) - chunk if self.weights else chunk

    def set_mean(self, number: int, mean: Tensor) -> None:
        """Store the mean of a chunk over the groups for `step`; it is in host memory when this returns."""
        self._part(self._means, self._indices()[number]).copy_(mean)

    def step(self, copy: list[Tensor]) -> None:
        """Take the outer step with the stored means, and set the inner weights to the averaged ones.

        With a copy of the inner weights, the updates since that copy are kept: inner = outer + (inner - copy). They are
        part of the next change. Source: Kale et al. 2025, Eager updates for overlapped communication in DiLoCo, arXiv
        2502.12996, the delayed outer step.
        """
        for index in self._indices():
            inner, averaged = self._part(self.inner, index), self._averaged(index)
            if copy:
                inner.add_(averaged - self._on_device(copy, index))
            else:
                inner.copy_(averaged)
        self.library.synchronize()  # completes the copies to the host

    def _averaged(self, index: ChunkIndex) -> Tensor:
        """Return the averaged weights of a chunk, and start copying its outer weights and momentum to host memory."""
        mean = self._on_device(self._means, index)
        if not self.weights:
            return mean
        mu, rate = self._settings.outer_momentum, self._settings.outer_lr
        if mu:
            momentum = self._on_device(self.momentum, index).mul(mu).add_(mean)
            self._part(self.momentum, index).copy_(momentum, non_blocking=True)
            mean = mean.add(momentum, alpha=mu)
        outer = self._on_device(self.weights, index).sub(mean, alpha=rate)
        self._part(self.weights, index).copy_(outer, non_blocking=True)
        return outer

    def _on_device(self, tensors: list[Tensor], index: ChunkIndex) -> Tensor:
        """Return a chunk of tensors on the device of the inner weights, without a copy if it is there already."""
        return self._part(tensors, index).to(self.inner[index[0]].device, non_blocking=True)

    def _part(self, tensors: list[Tensor], index: ChunkIndex) -> Tensor:
        number, begin = index
        return tensors[number][begin : begin + self._chunk]

    def _indices(self) -> list[ChunkIndex]:
        return [(number, begin) for number, one in enumerate(self.inner) for begin in range(0, len(one), self._chunk)]


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of tensors in host memory, page-locked if the tensors are on a GPU."""
    return [host_memory(one).copy_(one.detach()) for one in tensors]
