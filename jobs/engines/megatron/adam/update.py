"""AdamW's update in plain torch, for CPUs; and the hyperparameters of a step, which the GPU kernels use too."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from jobs.engines.megatron.adam.shards import Shard
from jobs.engines.megatron.hashing import hash32


class Moments(NamedTuple):
    """Adam's moments of a shard, flat, both in FP32 or both in BF16."""

    exp_avg: Tensor
    exp_avg_sq: Tensor


class Step(NamedTuple):
    """The hyperparameters of a step; `count` starts at 1."""

    count: int  # type: ignore[assignment]  # it hides tuple.count
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def decay(self) -> float:
        """The factor of weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def size(self) -> float:
        """The learning rate with the bias correction of the first moment."""
        return self.lr / (1 - self.beta1**self.count)

    @property
    def root(self) -> float:
        """The bias correction of the second moment: its square root is divided by this."""
        return math.sqrt(1 - self.beta2**self.count)

    def seed(self, bucket: int) -> int:
        """Return the 31-bit seed of a bucket's stochastic rounding; kernels are compiled once for all seeds."""
        return int(hash32(hash32(torch.tensor(self.count)) ^ bucket)) & 0x7FFFFFFF


def sum_of_squares(shards: list[Shard]) -> Tensor:
    """Return the sum of the squares of the gradients that this rank contributes to the norm."""
    counted = [shard.grad[begin:end] for shard in shards for begin, end in shard.counted.ranges]
    zero = torch.zeros((), dtype=torch.float32, device=torch.cuda.current_device())
    return torch.stack([zero, *torch._foreach_norm(counted)]).square().sum()


def update(shard: Shard, moments: Moments, factor: Tensor, step: Step) -> None:
    """Update moments, master weights and weights; the gradient is multiplied by the factor first, and overwritten."""
    shard.grad.mul_(factor)
    for begin, end in shard.decayed.ranges:
        shard.master[begin:end].mul_(step.decay)
    if moments.exp_avg.dtype is torch.float32:
        _update_by_torch(shard, moments, step)
    else:
        _update_rounded(shard, moments, step)
    shard.weights.copy_(shard.master)


def _update_by_torch(shard: Shard, moments: Moments, step: Step) -> None:
    adamw(
        [shard.master],
        [shard.grad],
        [moments.exp_avg],
        [moments.exp_avg_sq],
        [],
        [torch.tensor(step.count - 1.0)],
        fused=True,
        amsgrad=False,
        beta1=step.beta1,
        beta2=step.beta2,
        lr=step.lr,
        weight_decay=0.0,
        eps=step.eps,
        maximize=False,
    )


def _update_rounded(shard: Shard, moments: Moments, step: Step) -> None:
    """Update with moments in FP32, and store them in BF16."""
    grad, exp_avg, exp_avg_sq = shard.grad, moments.exp_avg.float(), moments.exp_avg_sq.float()
    exp_avg += (1 - step.beta1) * (grad - exp_avg)
    exp_avg_sq.mul_(step.beta2).add_((1 - step.beta2) * grad * grad)
    shard.master.sub_(step.size * exp_avg / (exp_avg_sq.sqrt() / step.root + step.eps))
    index = shard.first + torch.arange(len(grad), device=grad.device)
    bits = random_bits(index, step.seed(shard.bucket))
    moments.exp_avg.copy_(rounded(exp_avg, bits & 0xFFFF))
    moments.exp_avg_sq.copy_(rounded(exp_avg_sq, bits >> 16))


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """Return FP32 values in BF16, rounded stochastically, so that the expected value is the exact value.

    bits: 16 random bits per value. BF16 keeps the upper half of an FP32 value. Random bits that are added to the lower
    half carry into the upper half with exactly the probability with which the value must be rounded up.
    """
    raw = (x.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return torch.where(x.isnan(), x, raw.view(torch.float32)).bfloat16()


def random_bits(index: Tensor, seed: int) -> Tensor:
    """Return 32 random bits for each index (int64); the GPU kernel computes the same bits."""
    return hash32((hash32((index & 0xFFFFFFFF) ^ seed) + (index >> 32)) & 0xFFFFFFFF)
