"""The outer weights of groups that train apart, and their optimizer.

    change = outer - inner, its mean over the groups        the outer step's gradient
    momentum = mu momentum + change                         torch.optim.SGD with nesterov=True, as DiLoCo has it
    outer = outer - rate (change + mu momentum)             the merged weights; each group goes on from them

The outer weights and the momentum are FP32 in host memory, of the shard whose master weights this rank has, and so is
the mean between exchange and step. All arithmetic runs where the inner weights are. On a GPU the host's tensors are
page-locked and pass through its memory piece by piece, in the order of its current stream. Adam's moments stay each
group's own. The mean of uncompressed weights needs no outer weights.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.contract.local_sgd import Average, Compress, LocalSgd
from jobs.engines.rank_state import host_memory
from jobs.local_sgd.merging import piece_size

Place = tuple[int, int]
"""Of a piece: the number of its tensor, and where it begins there."""


class Outer:
    """The outer weights of some flat FP32 tensors, and their optimizer. Pieces are numbered over all tensors."""

    def __init__(self, inner: list[Tensor], local_sgd: LocalSgd) -> None:
        self.inner, self._settings = inner, local_sgd
        self.library: Any = torch.cuda if any(one.is_cuda for one in inner) else torch.cpu
        is_mean = local_sgd.average is Average.parameters
        self.weights = [] if is_mean and local_sgd.compress is Compress.none else on_host(inner)
        has_momentum = self.weights and local_sgd.outer_momentum
        self.momentum = [host_memory(one).zero_() for one in inner] if has_momentum else []
        self._means = [host_memory(one) for one in inner]
        self._copy = [host_memory(one) for one in inner] if local_sgd.overlap_steps else []
        self._piece = piece_size(sum(len(one) for one in inner))

    def restart(self) -> None:
        """Go on from the inner weights, which are the same in all groups."""
        for outer, inner in zip(self.weights, self.inner, strict=False):  # there may be no outer weights
            outer.copy_(inner)

    def copy(self) -> list[Tensor]:
        """Return a copy of the inner weights in host memory, until the next one; only with `overlap_steps`."""
        return [copy.copy_(inner) for copy, inner in zip(self._copy, self.inner, strict=True)]

    def pieces(self, source: list[Tensor]) -> Iterator[Tensor]:
        """Yield what the groups exchange: how the weights have changed, or themselves where no outer weights are."""
        for place in self._places():
            piece = self._on_device(source, place)
            yield self._on_device(self.weights, place) - piece if self.weights else piece

    def take(self, number: int, mean: Tensor) -> None:
        """Take the mean of a piece over the groups, until `step`; it is in host memory when this returns."""
        self._part(self._means, self._places()[number]).copy_(mean)

    def step(self, copy: list[Tensor]) -> None:
        """Make the outer step with the means. The inner weights go on from the merged ones.

        They keep what was trained since a copy of them, if there is one: inner = outer + (inner - copy), and that is
        part of the next change. Source: Kale et al. 2025, Eager updates for overlapped communication in DiLoCo, arXiv
        2502.12996, whose delayed outer step this is.
        """
        for place in self._places():
            inner, merged = self._part(self.inner, place), self._merged(place)
            if copy:
                inner.add_(merged - self._on_device(copy, place))
            else:
                inner.copy_(merged)
        self.library.synchronize()  # the host's tensors are whole then

    def _merged(self, place: Place) -> Tensor:
        """Return the merged weights of a piece; outer weights and momentum are on their way to host memory."""
        mean = self._on_device(self._means, place)
        if not self.weights:
            return mean
        mu, rate = self._settings.outer_momentum, self._settings.outer_lr
        if mu:
            momentum = self._on_device(self.momentum, place).mul(mu).add_(mean)
            self._part(self.momentum, place).copy_(momentum, non_blocking=True)
            mean = mean.add(momentum, alpha=mu)
        outer = self._on_device(self.weights, place).sub(mean, alpha=rate)
        self._part(self.weights, place).copy_(outer, non_blocking=True)
        return outer

    def _on_device(self, tensors: list[Tensor], place: Place) -> Tensor:
        """Return a piece of tensors, on the device of the inner weights: itself if it is there already."""
        return self._part(tensors, place).to(self.inner[place[0]].device, non_blocking=True)

    def _part(self, tensors: list[Tensor], place: Place) -> Tensor:
        number, begin = place
        return tensors[number][begin : begin + self._piece]

    def _places(self) -> list[Place]:
        return [(number, begin) for number, one in enumerate(self.inner) for begin in range(0, len(one), self._piece)]


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of tensors in host memory, page-locked if they are of a GPU."""
    return [host_memory(one).copy_(one.detach()) for one in tensors]
