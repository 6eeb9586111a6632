"""The weights of one TP rank, as generation reads them: linears in BF16, FP32, FP8 or NF4, all else in one dtype.

Shape letters: H hidden, O and I output and input of a linear on this TP rank, V vocabulary of this TP rank,
K = I / 64 blocks of a row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.contract import checkpoint
from bench.contract.checkpoint import Stored
from bench.contract.generation import WeightPrecision
from bench.contract.model import Model
from bench.errors import ConfigError
from jobs.engines.megatron import quantize
from jobs.engines.megatron.generation.ranks import Ranks
from jobs.engines.megatron.quantize import BF16, FP8, LARGEST, SMALLEST_AMAX
from jobs.weights import nf4
from jobs.weights.checkpoint_reader import Reader, Shape, Wanted


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
            assert self.scale is not None
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


_EMBEDDING, _HEAD, _NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
_LAYERS = "decoder.layers."
_NORMS = {"norm_H": "input_layernorm", "mlp_norm_H": "pre_mlp_layernorm"}
_LINEARS = {
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
_SPLIT_BY_COLUMN = ("proj", "fc2")


class Split(NamedTuple):
    """The axis of a tensor that the TP ranks split, and how many pieces it consists of that are each split."""

    axis: int
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where weights go, and as what."""

    precision: WeightPrecision
    ranks: Ranks
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what is not quantised."""
        return dtype_of(self.precision)


def random(model: Model, place: Place, *, seed: int) -> Weights:
    """Return weights that are drawn from the seed; each TP rank draws its own parts."""
    like: dict[str, Any] = {"dtype": place.dtype, "device": place.device}
    precision, tp = place.precision, place.ranks.size
    generator = torch.Generator(place.device).manual_seed(seed + place.ranks.rank)
    spread = math.sqrt(2 / (5 * model.hidden_size))

    def drawn(num_out: int, num_in: int) -> Tensor:
        empty: Tensor = torch.empty(num_out, num_in, **like)
        return empty.normal_(std=spread, generator=generator)

    def layer() -> Layer:
        parts: dict[str, Any] = {name: stored(drawn(*shape), precision) for name, shape in shapes(model, tp).items()}
        return Layer(**parts | {name: torch.ones(model.hidden_size, **like) for name in _NORMS})

    num_rows = model.vocab_size // tp
    embedding_VH = drawn(num_rows, model.hidden_size)
    layers = [layer() for _ in range(model.num_layers)]
    head = Linear(embedding_VH if model.tied_embeddings else drawn(num_rows, model.hidden_size))
    return Weights(embedding_VH, layers, torch.ones(model.hidden_size, **like), head)


def load(folder: Path, model: Model, place: Place) -> Weights:
    """Return the weights of a checkpoint, or of the conversion in a Hugging Face folder.

    Linears in BF16 or FP32 are quantised while they are loaded, one at a time. A checkpoint in FP8 or NF4 is taken as
    it is, if the precision is the same.

    Raises:
        ConfigError: it is not a checkpoint of this model, or is quantised in another way.
    """
    folder, precision = located(folder, place.precision), place.precision
    checkpoint.require_model(folder, model)
    found = checkpoint.stored(folder)
    if found is not Stored.plain and found.name != precision.name:
        raise ConfigError(
            f"the weights are in {found.name.upper()}, and generation is asked for {precision.name}",
            where=str(folder),
            fix=f"ask for {found.name}, or name a conversion that was made without --{found.name}",
        )
    return _Loader(Reader(folder), model, place).weights(found)


def located(folder: Path, precision: WeightPrecision) -> Path:
    """Return the folder of the checkpoint; of a Hugging Face folder, the conversion that suits the precision best."""
    if not (folder / "config.json").exists() or (folder / "metadata.json").exists():
        return folder
    suited = {WeightPrecision.fp8: Stored.fp8, WeightPrecision.nf4: Stored.nf4}.get(precision, Stored.plain)
    own = folder / checkpoint.FOLDERS[suited]
    return own if own.exists() else folder / checkpoint.CONVERTED


class _Loader:
    """Reads the parts of a TP rank. A checkpoint holds the same tensor of all layers as one."""

    def __init__(self, reader: Reader, model: Model, place: Place) -> None:
        self.reader, self.model, self.place = reader, model, place

    def weights(self, found: Stored) -> Weights:
        linear = {Stored.plain: self._quantized, Stored.fp8: self._fp8, Stored.nf4: self._nf4}[found]
        embedding_VH = self._table(_EMBEDDING)
        layers = [self._layer(i, linear) for i in range(self.model.num_layers)]
        hidden = (self.model.hidden_size,)
        norm_H = self._read(_NORM, hidden, [((0,), hidden)])
        head_VH = embedding_VH if self.model.tied_embeddings else self._table(_HEAD)
        return Weights(embedding_VH, layers, norm_H, Linear(head_VH))

    def _layer(self, index: int, linear: Callable[[str, int], Linear]) -> Layer:
        hidden = (self.model.hidden_size,)
        parts: dict[str, Any] = {name: self._of_layer(f"{key}.weight", index, hidden) for name, key in _NORMS.items()}
        return Layer(**parts | {name: linear(name, index) for name in _LINEARS})

    def _quantized(self, name: str, index: int) -> Linear:
        """Return a linear that is stored without quantisation."""
        return stored(self._linear(name, index, "weight"), self.place.precision)

    def _fp8(self, name: str, index: int) -> Linear:
        """Return a linear in FP8; all of its rows have the scale of the weight."""
        values_OI = self._linear(name, index, quantize.STORED, dtype=quantize.FP8)
        scale = self._of_layer(f"{_LINEARS[name]}.{quantize.STORED_SCALE}", index, (1,), dtype=torch.float32)
        return Linear(values_OI, scale.expand(len(values_OI)).contiguous())

    def _nf4(self, name: str, index: int) -> Linear:
        """Return a linear in NF4; its absmax are rounded to 8 bits, as training rounds them."""
        codes = self._linear(name, index, nf4.STORED, dtype=torch.uint8, per_number=2)
        absmax_OK = self._linear(name, index, nf4.STORED_ABSMAX, dtype=quantize.BF16, per_number=nf4.BLOCK)
        return from_nf4(nf4.Nf4(codes, *nf4.quantize_absmax(absmax_OK)))

    def _linear(
        self, name: str, index: int, suffix: str, *, dtype: torch.dtype | None = None, per_number: int = 1
    ) -> Tensor:
        """Return this rank's part of a tensor whose rows have a number for every `per_number` weights."""
        num_out, num_in = shapes(self.model, 1)[name]
        axis = 2 if name in _SPLIT_BY_COLUMN else 1
        split = Split(axis, pieces=2 if name == "fc1" else 1)  # gates and ups are split one by one
        whole = (num_out, num_in // per_number)
        return self._of_layer(f"{_LINEARS[name]}.{suffix}", index, whole, split=split, dtype=dtype)

    def _of_layer(
        self, key: str, index: int, whole: Shape, *, split: Split | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return this rank's part of a tensor of one layer."""
        boxes = self._boxes((index, *(0 for _ in whole)), (1, *whole), split)
        axis = split.axis if split else 0
        return self._read(f"{_LAYERS}{key}", (self.model.num_layers, *whole), boxes, axis=axis, dtype=dtype)[0]

    def _table(self, key: str) -> Tensor:
        """Return this rank's rows of the embedding or of the head."""
        whole = (self.model.vocab_size, self.model.hidden_size)
        return self._read(key, whole, self._boxes((0, 0), whole, Split(axis=0)))

    def _boxes(self, offset: Shape, shape: Shape, split: Split | None) -> list[tuple[Shape, Shape]]:
        """Return offset and shape of this rank's parts of a box."""
        if split is None:
            return [(offset, shape)]
        axis, piece = split.axis, shape[split.axis] // split.pieces
        size = piece // self.place.ranks.size
        begins = [i * piece + self.place.ranks.rank * size for i in range(split.pieces)]
        own = (*shape[:axis], size, *shape[axis + 1 :])
        return [((*offset[:axis], begin, *offset[axis + 1 :]), own) for begin in begins]

    def _read(
        self,
        key: str,
        whole: Shape,
        boxes: list[tuple[Shape, Shape]],
        *,
        axis: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return boxes of a tensor, one behind the other along an axis."""
        dtype = dtype or self.place.dtype
        wanted = [Wanted(key, whole, offset, torch.empty(shape, dtype=dtype)) for offset, shape in boxes]
        self.reader.read(wanted)
        return torch.cat([box.into for box in wanted], dim=axis).to(self.place.device)
