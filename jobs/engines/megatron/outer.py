"""The outer weights of groups that train apart, and their optimizer.

    change = outer - inner, its mean over the groups        the outer step's gradient
    momentum = mu momentum + change                         torch.optim.SGD with nesterov=True, as DiLoCo has it
    outer = outer - rate (change + mu momentum)             the merged weights; each group goes on from them

The outer weights and the momentum are FP32 in host memory, of the shard whose master weights this rank has. Adam's
moments stay each group's own. The mean of uncompressed weights needs no outer weights.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.contract.local_sgd import Average, Compress, LocalSgd
from jobs.ranks.merging import piece_size


class Outer:
    """The outer weights of some flat tensors, and their optimizer. Pieces are numbered over all tensors."""

    def __init__(self, inner: list[Tensor], local_sgd: LocalSgd) -> None:
        self.inner, self._settings = inner, local_sgd
        is_mean = local_sgd.average is Average.parameters
        self.weights = [] if is_mean and local_sgd.compress is Compress.none else on_host(inner)
        self.momentum = [torch.zeros_like(one) for one in self.weights] if local_sgd.outer_momentum else []
        self._means: list[Tensor] = []
        self._piece = piece_size(sum(len(one) for one in inner))

    def restart(self) -> None:
        """Go on from the inner weights, which are the same in all groups."""
        for outer, inner in zip(self.weights, self.inner, strict=False):  # there may be no outer weights
            outer.copy_(inner)

    def pieces(self, source: list[Tensor]) -> Iterator[Tensor]:
        """Yield what the groups exchange: how the weights have changed, or themselves where no outer weights are."""
        for number, begin in self._places():
            end = begin + self._piece
            piece = source[number][begin:end].to("cpu", torch.float32)
            yield self.weights[number][begin:end] - piece if self.weights else piece

    def take(self, place: int, mean: Tensor) -> None:
        """Take the mean of a piece over the groups, until `step`."""
        if len(self._means) != len(self.inner):
            self._means = [torch.empty(one.shape, dtype=torch.float32) for one in self.inner]
        number, begin = self._places()[place]
        self._means[number][begin : begin + self._piece].copy_(mean)

    def step(self) -> list[Tensor]:
        """Make the outer step with the means; return the merged weights, in host memory."""
        if not self.weights:
            return self._means
        mu, rate = self._settings.outer_momentum, self._settings.outer_lr
        for number, (outer, mean) in enumerate(zip(self.weights, self._means, strict=True)):
            if mu:
                self.momentum[number].mul_(mu).add_(mean)
                mean.add_(self.momentum[number], alpha=mu)
            outer.sub_(mean, alpha=rate)
        return self.weights

    def apply(self, merged: list[Tensor], copy: list[Tensor]) -> None:
        """Let the inner weights be the merged ones, and keep what was trained since a copy of them, if there is one.

        inner = outer + (inner - copy): what was trained meanwhile is part of the next change. Source: Kale et al. 2025,
        Eager updates for overlapped communication in DiLoCo, arXiv 2502.12996, whose delayed outer step this is.
        """
        for number, (inner, new) in enumerate(zip(self.inner, merged, strict=True)):
            if copy:
                inner.add_((new - copy[number]).to(inner.device))
            else:
                inner.copy_(new)

    def _places(self) -> list[tuple[int, int]]:
        return [(number, begin) for number, one in enumerate(self.inner) for begin in range(0, len(one), self._piece)]


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of tensors in host memory, in FP32."""
    return [one.detach().to("cpu", torch.float32, copy=True) for one in tensors]
