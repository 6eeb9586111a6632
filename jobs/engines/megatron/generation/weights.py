"""The weights of one TP rank for generation: linears in BF16, FP32, FP8 or NF4, all other weights in BF16 or FP32.

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
from jobs.engines.megatron.head_norms import HeadNorms
from jobs.engines.megatron.quantize import BF16, FP8, LARGEST, SMALLEST_AMAX
from jobs.weights import nf4
from jobs.weights.checkpoint_reader import Reader, Shape, Wanted


def dtype_of(precision: WeightPrecision) -> torch.dtype:
    """Return the data type of activations, embedding, norms and head, which are not quantised."""
    return torch.float32 if precision is WeightPrecision.fp32 else BF16


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight [O, I]. Activations stay in BF16 or FP32; FP8 and NF4 weights only save memory traffic."""

    values: Tensor
    """[O, I]; in NF4 [O, I / 2] as uint8, the first of two neighbours in the high half of the byte."""
    scale: Tensor | None = None
    """In FP32: per row [O] in FP8, per block [O, K] in NF4."""

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        num_out, width = self.values.shape
        return num_out, 2 * width if self.values.dtype is torch.uint8 else width

    def product(self, x_MI: Tensor) -> Tensor:
        """Return weight x [M, O], by one GEMM of torch. FP8 values are exact in BF16; they are scaled afterwards."""
        if self.values.dtype is FP8:
            assert self.scale is not None
            return (x_MI @ self.values.to(x_MI.dtype).T).mul_(self.scale)
        return x_MI @ self.dense(x_MI.dtype).T

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight [O, I]."""
        if self.scale is None:
            return self.values.to(dtype)
        if self.values.dtype is not torch.uint8:
            return self.values.to(dtype).mul_(self.scale[:, None])  # in FP32, rounded once
        codes = torch.stack([self.values >> 4, self.values & 15], dim=-1)
        levels = nf4.nf4_levels(codes.device)[codes.int()].view(*self.scale.shape, nf4.BLOCK)
        return (levels * self.scale[..., None]).to(dtype).view(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes that a GEMM reads."""
        parts = (self.values, self.scale)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of a transformer layer, with megatron-core's names."""

    norm_H: Tensor
    qkv: Linear
    """Queries, key and value of each group of this rank."""
    proj: Linear
    mlp_norm_H: Tensor
    fc1: Linear
    """Gates first, then ups."""
    fc2: Linear
    qkv_bias_O: Tensor | None = None
    q_norm_D: Tensor | None = None
    k_norm_D: Tensor | None = None

    def head_norms(self, eps: float) -> HeadNorms | None:
        """Return the norms of the heads of q and k; None if the model has none."""
        if self.q_norm_D is None or self.k_norm_D is None:
            return None
        return HeadNorms(self.q_norm_D, self.k_norm_D, eps)


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a TP rank."""

    embedding_VH: Tensor
    layers: Sequence[Layer]
    norm_H: Tensor
    head: Linear

    @property
    def bytes_per_step(self) -> int:
        """The bytes of all linears, which one decode step reads. Of the embedding it reads one row per token."""
        linears = [part for x in self.layers for part in (x.qkv, x.proj, x.fc1, x.fc2)]
        return sum(linear.num_bytes for linear in [*linears, self.head])


def store(weight_OI: Tensor, precision: WeightPrecision) -> Linear:
    """Return a weight in this precision; in FP8 each row has its own scale."""
    if precision is WeightPrecision.fp8:
        amax_O = weight_OI.abs().amax(1).float().clamp(min=SMALLEST_AMAX)
        scale_O = amax_O / torch.full_like(amax_O, LARGEST)
        return Linear((weight_OI.float() / scale_O[:, None]).to(FP8), scale_O)
    if precision is WeightPrecision.nf4:
        return from_nf4(nf4.quantize(weight_OI))
    return Linear(weight_OI.to(dtype_of(precision)))


def from_nf4(weight: nf4.Nf4) -> Linear:
    """Return an NF4 weight of the training engine, with its absmax in FP32 (half a bit more per weight)."""
    return Linear(weight.codes, nf4.dequantize_absmax(weight).view(len(weight.codes), -1))


def shapes(model: Model, tp: int) -> dict[str, tuple[int, int]]:
    """Return O and I of a layer's linears on one of tp ranks, by their names in `Layer`."""
    hidden, width = model.hidden_size, model.ffn_hidden_size
    return {
        "qkv": ((model.q_size + 2 * model.kv_size) // tp, hidden),
        "proj": (hidden, model.q_size // tp),
        "fc1": (2 * width // tp, hidden),
        "fc2": (hidden, width // tp),
    }


def _vector_sizes(model: Model, tp: int) -> dict[str, int]:
    """Return the sizes of a layer's norms and bias on one of tp ranks, by their names in `Layer`."""
    norms = {"norm_H": model.hidden_size, "mlp_norm_H": model.hidden_size}
    bias = {"qkv_bias_O": shapes(model, tp)["qkv"][0]} if model.qkv_bias else {}
    return norms | bias | ({"q_norm_D": model.head_size, "k_norm_D": model.head_size} if model.qk_norm else {})


def require_divisible(model: Model, tp: int, precision: WeightPrecision) -> None:
    """Check that the model can be split over tp ranks.

    Raises:
        ConfigError: the query groups, the vocabulary, the MLP or the blocks of 4-bit weights are not divisible by tp.
    """
    split = {
        "query groups": model.num_query_groups,
        "rows of the vocabulary": model.vocab_size,
        "columns of the MLP": model.ffn_hidden_size,
    }
    for parts, size in split.items():
        if size % tp:
            fix = f"set parallel.tp to a divisor of {size}"
            raise ConfigError(f"parallel.tp={tp} does not divide the {size} {parts}", where="parallel.tp", fix=fix)
    odd = {name: num_in for name, (_, num_in) in shapes(model, tp).items() if num_in % nf4.BLOCK}
    if precision is WeightPrecision.nf4 and odd:
        name, num_in = next(iter(odd.items()))
        raise ConfigError(
            f"a row of {name} has {num_in} weights on each rank, but NF4 needs a multiple of {nf4.BLOCK} weights",
            where="parallel.tp, task.generation.nf4",
            fix="lower parallel.tp, or set task.generation.nf4=null",
        )


_EMBEDDING, _HEAD, _NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
_LAYERS = "decoder.layers."
_VECTORS = {
    "norm_H": "input_layernorm.weight",
    "mlp_norm_H": "pre_mlp_layernorm.weight",
    "qkv_bias_O": "self_attention.linear_qkv.bias",
    "q_norm_D": "self_attention.q_layernorm.weight",
    "k_norm_D": "self_attention.k_layernorm.weight",
}
_LINEARS = {
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
_SPLIT_BY_COLUMN = ("proj", "fc2")


class Split(NamedTuple):
    """The axis of a tensor that TP splits, and the number of pieces along it that are split separately."""

    axis: int
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """Precision, TP ranks and device of the weights."""

    precision: WeightPrecision
    ranks: Ranks
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """The data type of unquantised weights."""
        return dtype_of(self.precision)


def random_weights(model: Model, place: Place, *, seed: int) -> Weights:
    """Return random weights of this seed; each TP rank initialises its own parts."""
    options: dict[str, Any] = {"dtype": place.dtype, "device": place.device}
    precision, tp = place.precision, place.ranks.size
    generator = torch.Generator(place.device).manual_seed(seed + place.ranks.rank)
    std = math.sqrt(2 / (5 * model.hidden_size))

    def matrix(num_out: int, num_in: int) -> Tensor:
        empty: Tensor = torch.empty(num_out, num_in, **options)
        return empty.normal_(std=std, generator=generator)

    def layer() -> Layer:
        parts: dict[str, Any] = {name: store(matrix(*shape), precision) for name, shape in shapes(model, tp).items()}
        vectors = {name: torch.ones(size, **options) for name, size in _vector_sizes(model, tp).items()}
        if model.qkv_bias:
            vectors["qkv_bias_O"].zero_()
        return Layer(**parts | vectors)

    num_rows = model.vocab_size // tp
    embedding_VH = matrix(num_rows, model.hidden_size)
    layers = [layer() for _ in range(model.num_layers)]
    head = Linear(embedding_VH if model.tied_embeddings else matrix(num_rows, model.hidden_size))
    return Weights(embedding_VH, layers, torch.ones(model.hidden_size, **options), head)


def load(folder: Path, model: Model, place: Place) -> Weights:
    """Return the weights of a checkpoint, or of the conversion in a Hugging Face folder.

    Linears in BF16 or FP32 are quantised one at a time while they are loaded. A checkpoint in FP8 or NF4 is loaded
    unchanged and must have the precision of the plan.

    Raises:
        ConfigError: it is not a checkpoint of this model, or is quantised in another way.
    """
    folder, precision = located(folder, place.precision), place.precision
    checkpoint.require_model(folder, model)
    saved_as = checkpoint.stored(folder)
    if saved_as is not Stored.plain and saved_as.name != precision.name:
        setting = "task.generation.nf4=true" if saved_as is Stored.nf4 else "precision=fp8"
        raise ConfigError(
            f"the weights of the checkpoint are in {saved_as.name}, but the task requests {precision.name}",
            where=str(folder),
            fix=f"set {setting}, or convert the weights without --{saved_as.name}",
        )
    return _Loader(Reader(folder), model, place).weights(saved_as)


def located(folder: Path, precision: WeightPrecision) -> Path:
    """Return the folder of the checkpoint; of a Hugging Face folder, the conversion for this precision."""
    if not (folder / "config.json").exists() or (folder / "metadata.json").exists():
        return folder
    preferred = {WeightPrecision.fp8: Stored.fp8, WeightPrecision.nf4: Stored.nf4}.get(precision, Stored.plain)
    converted = folder / checkpoint.FOLDERS[preferred]
    return converted if converted.exists() else folder / checkpoint.CONVERTED


class _Loader:
    """Reads a TP rank's parts of a checkpoint, which stores each weight of all layers in one tensor."""

    def __init__(self, reader: Reader, model: Model, place: Place) -> None:
        self.reader, self.model, self.place = reader, model, place

    def weights(self, saved_as: Stored) -> Weights:
        linear = {Stored.plain: self._quantized, Stored.fp8: self._fp8, Stored.nf4: self._nf4}[saved_as]
        embedding_VH = self._vocabulary_rows(_EMBEDDING)
        layers = [self._layer(i, linear) for i in range(self.model.num_layers)]
        hidden = (self.model.hidden_size,)
        norm_H = self._read(_NORM, hidden, [((0,), hidden)])
        head_VH = embedding_VH if self.model.tied_embeddings else self._vocabulary_rows(_HEAD)
        return Weights(embedding_VH, layers, norm_H, Linear(head_VH))

    def _layer(self, index: int, linear: Callable[[str, int], Linear]) -> Layer:
        parts: dict[str, Any] = {name: linear(name, index) for name in _LINEARS}
        for name, size in _vector_sizes(self.model, 1).items():
            split = Split(axis=1) if name == "qkv_bias_O" else None
            parts[name] = self._read_layer(_VECTORS[name], index, (size,), split=split)
        return Layer(**parts)

    def _quantized(self, name: str, index: int) -> Linear:
        """Read an unquantised linear and quantise it."""
        return store(self._linear(name, index, "weight"), self.place.precision)

    def _fp8(self, name: str, index: int) -> Linear:
        """Read a linear in FP8; all rows have the scale of the weight."""
        values_OI = self._linear(name, index, quantize.STORED, dtype=quantize.FP8)
        scale = self._read_layer(f"{_LINEARS[name]}.{quantize.STORED_SCALE}", index, (1,), dtype=torch.float32)
        return Linear(values_OI, scale.expand(len(values_OI)).contiguous())

    def _nf4(self, name: str, index: int) -> Linear:
        """Read a linear in NF4; its absmax are rounded to 8 bits, as in training."""
        codes = self._linear(name, index, nf4.STORED, dtype=torch.uint8, weights_per_element=2)
        absmax_OK = self._linear(name, index, nf4.STORED_ABSMAX, dtype=quantize.BF16, weights_per_element=nf4.BLOCK)
        return from_nf4(nf4.Nf4(codes, *nf4.quantize_absmax(absmax_OK)))

    def _linear(
        self, name: str, index: int, suffix: str, *, dtype: torch.dtype | None = None, weights_per_element: int = 1
    ) -> Tensor:
        """Read this rank's part of a tensor with one element per `weights_per_element` weights of a row."""
        num_out, num_in = shapes(self.model, 1)[name]
        axis = 2 if name in _SPLIT_BY_COLUMN else 1
        split = Split(axis, pieces=2 if name == "fc1" else 1)  # gates and ups are split separately
        whole = (num_out, num_in // weights_per_element)
        return self._read_layer(f"{_LINEARS[name]}.{suffix}", index, whole, split=split, dtype=dtype)

    def _read_layer(
        self, key: str, index: int, whole: Shape, *, split: Split | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read this rank's part of a tensor of one layer."""
        boxes = self._boxes((index, *(0 for _ in whole)), (1, *whole), split)
        axis = split.axis if split else 0
        return self._read(f"{_LAYERS}{key}", (self.model.num_layers, *whole), boxes, axis=axis, dtype=dtype)[0]

    def _vocabulary_rows(self, key: str) -> Tensor:
        """Read this rank's rows of the embedding or of the head."""
        whole = (self.model.vocab_size, self.model.hidden_size)
        return self._read(key, whole, self._boxes((0, 0), whole, Split(axis=0)))

    def _boxes(self, offset: Shape, shape: Shape, split: Split | None) -> list[tuple[Shape, Shape]]:
        """Return offset and shape of this rank's parts of a box (a rectangular block of a tensor)."""
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
        """Read boxes of a tensor and concatenate them along an axis."""
        dtype = dtype or self.place.dtype
        requests = [Wanted(key, whole, offset, torch.empty(shape, dtype=dtype)) for offset, shape in boxes]
        self.reader.read(requests)
        return torch.cat([box.into for box in requests], dim=axis).to(self.place.device)
