"""Fill the weights of a TP rank: with random numbers, or from a checkpoint that any layout has saved."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.contract import checkpoint
from bench.contract.checkpoint import Stored
from bench.contract.generation import WeightPrecision
from bench.contract.task import Model
from bench.errors import ConfigError
from jobs.engines.megatron.fp8 import quantize
from jobs.engines.megatron.generation.ranks import Ranks
from jobs.engines.megatron.generation.weights import Layer, Linear, Weights, dtype_of, from_nf4, shapes, stored
from jobs.weights import nf4
from jobs.weights.checkpoint_reader import Reader, Shape, Wanted

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
    like, precision, tp = {"dtype": place.dtype, "device": place.device}, place.precision, place.ranks.size
    generator = torch.Generator(place.device).manual_seed(seed + place.ranks.rank)
    spread = math.sqrt(2 / (5 * model.hidden_size))

    def drawn(num_out: int, num_in: int) -> Tensor:
        return torch.empty(num_out, num_in, **like).normal_(std=spread, generator=generator)

    def layer() -> Layer:
        linears = {name: stored(drawn(*shape), precision) for name, shape in shapes(model, tp).items()}
        norms = {name: torch.ones(model.hidden_size, **like) for name in _NORMS}
        return Layer(**norms, **linears)

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
        norms = {name: self._of_layer(f"{key}.weight", index, hidden) for name, key in _NORMS.items()}
        return Layer(**norms, **{name: linear(name, index) for name in _LINEARS})

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
