"""The weights of one TP rank, as generation reads them: linears in BF16, FP32, FP8 or NF4, all else in one dtype.

Shape letters: H hidden, O and I output and input of a linear on this TP rank, V vocabulary of this TP rank,
K = I / 64 blocks of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.contract.generation import WeightPrecision
from bench.contract.task import Model
from bench.errors import ConfigError
from jobs.engines.megatron.fp8.quantize import BF16, FP8, LARGEST, SMALLEST_AMAX
from jobs.weights import nf4


def dtype_of(precision: WeightPrecision) -> torch.dtype:
    """Return the dtype of activations, and of embedding, norms and head, which are not quantised."""
    return torch.float32 if precision is WeightPrecision.fp32 else BF16


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [O, I]. Products keep the accuracy of BF16 or FP32 activations: FP8 and NF4 save memory traffic."""

    values: Tensor
    """[O, I]; in NF4 [O, I / 2] as uint8, of two neighbours the first one in the high half of their byte."""
    scale: Tensor | None = None
    """In FP32: of each row [O] in FP8, of each block [O, K] in NF4."""

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        num_out, width = self.values.shape
        return num_out, 2 * width if self.values.dtype is torch.uint8 else width

    def product(self, x_MI: Tensor) -> Tensor:
        """Return weight x [M, O], by one GEMM of torch. FP8 numbers are exact in BF16, and are scaled after it."""
        if self.values.dtype is FP8:
            return (x_MI @ self.values.to(x_MI.dtype).T).mul_(self.scale)
        return x_MI @ self.dense(x_MI.dtype).T

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I] without quantisation."""
        if self.scale is None:
            return self.values.to(dtype)
        if self.values.dtype is not torch.uint8:
            return self.values.to(dtype).mul_(self.scale[:, None])  # in FP32, and rounded once
        codes = torch.stack([self.values >> 4, self.values & 15], dim=-1)
        levels = nf4.nf4_levels(codes.device)[codes.int()].view(*self.scale.shape, nf4.BLOCK)
        return (levels * self.scale[..., None]).to(dtype).view(self.shape)

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        parts = (self.values, self.scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of a transformer layer, under the names of megatron-core's linears."""

    norm_H: Tensor
    qkv: Linear
    """Of each group of this rank its queries, its key and its value."""
    proj: Linear
    mlp_norm_H: Tensor
    fc1: Linear
    """Gates first, then ups."""
    fc2: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a TP rank."""

    embedding_VH: Tensor
    layers: Sequence[Layer]
    norm_H: Tensor
    head: Linear

    @property
    def bytes_per_step(self) -> int:
        """What one step reads: all linears. Of the embedding it reads a row for each token."""
        linears = [part for x in self.layers for part in (x.qkv, x.proj, x.fc1, x.fc2)]
        return sum(linear.num_bytes for linear in [*linears, self.head])


def stored(weight_OI: Tensor, precision: WeightPrecision) -> Linear:
    """Return a weight in this precision; in FP8 each row has a scale of its own."""
    if precision is WeightPrecision.fp8:
        amax_O = weight_OI.abs().amax(1).float().clamp(min=SMALLEST_AMAX)
        scale_O = amax_O / torch.full_like(amax_O, LARGEST)
        return Linear((weight_OI.float() / scale_O[:, None]).to(FP8), scale_O)
    if precision is WeightPrecision.nf4:
        return from_nf4(nf4.quantize(weight_OI))
    return Linear(weight_OI.to(dtype_of(precision)))


def from_nf4(weight: nf4.Nf4) -> Linear:
    """Return a weight of training in NF4; its absmax become FP32, half a bit more for each number."""
    return Linear(weight.codes, nf4.dequantize_absmax(weight).view(len(weight.codes), -1))


def shapes(model: Model, tp: int) -> dict[str, tuple[int, int]]:
    """Return O and I of the linears of a layer on one of tp ranks, by their names in `Layer`."""
    hidden, width = model.hidden_size, model.ffn_hidden_size
    kv = hidden // model.num_attention_heads * model.num_query_groups
    return {
        "qkv": ((hidden + 2 * kv) // tp, hidden),
        "proj": (hidden, hidden // tp),
        "fc1": (2 * width // tp, hidden),
        "fc2": (hidden, width // tp),
    }


def require_divisible(model: Model, tp: int, precision: WeightPrecision) -> None:
    """Do nothing if the model can be split over tp ranks.

    Raises:
        ConfigError: a rank would get a part of a group, of a row of the vocabulary or of a block of 4-bit weights.
    """
    split = {
        "query groups": model.num_query_groups,
        "rows of the vocabulary": model.vocab_size,
        "columns of the MLP": model.ffn_hidden_size,
    }
    for what, size in split.items():
        if size % tp:
            fix = f"make tp a divisor of {size}"
            raise ConfigError(f"{size} {what} cannot be split over {tp} ranks", where="parallel.tp", fix=fix)
    odd = {name: num_in for name, (_, num_in) in shapes(model, tp).items() if num_in % nf4.BLOCK}
    if precision is WeightPrecision.nf4 and odd:
        name, num_in = next(iter(odd.items()))
        raise ConfigError(
            f"rows of {num_in} numbers of {name} cannot be cut into the blocks of {nf4.BLOCK} of 4-bit weights",
            where="parallel.tp, task.generation.nf4",
            fix="choose a smaller tp, or another precision",
        )
