"""Fill the weights of a TP rank: with random numbers, or from a checkpoint that any layout has saved."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.contract import checkpoint
from bench.contract.checkpoint import Stored
from bench.contract.generation import WeightPrecision
from bench.contract.task import Model
from bench.errors import ConfigError
from jobs.engines.megatron.fp8 import quantize
from jobs.engines.megatron.generation.weights import Layer, Linear, Weights, dtype_of, from_nf4, shapes, stored
from jobs.weights import nf4
from jobs.weights.checkpoint_reader import Reader, Wanted

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


def random(model: Model, precision: WeightPrecision, *, tp: int, seed: int, device: torch.device) -> Weights:
    """Return weights that are drawn from the seed; ranks draw their own parts, and what they share is the same."""
    generator = torch.Generator(device).manual_seed(seed)
    spread = math.sqrt(2 / (5 * model.hidden_size))

    def drawn(num_out: int, num_in: int) -> Tensor:
        like = {"dtype": dtype_of(precision), "device": device}
        return torch.empty(num_out, num_in, **like).normal_(std=spread, generator=generator)

    def ones() -> Tensor:
        return torch.ones(model.hidden_size, dtype=dtype_of(precision), device=device)

    def layer() -> Layer:
        linears = {name: stored(drawn(*shape), precision) for name, shape in shapes(model, tp).items()}
        return Layer(norm_H=ones(), mlp_norm_H=ones(), **linears)

    num_rows = model.vocab_size // tp
    embedding_VH = drawn(num_rows, model.hidden_size)
    layers = [layer() for _ in range(model.num_layers)]
    head = Linear(embedding_VH if model.tied_embeddings else drawn(num_rows, model.hidden_size))
    return Weights(embedding_VH, layers, ones(), head)


def load(folder: Path, model: Model, precision: WeightPrecision, *, tp: int, rank: int, device: torch.device) -> Weights:
    """Return the weights of a checkpoint, or of the conversion in a Hugging Face folder.

    Linears in BF16 or FP32 are quantised while they are loaded, one at a time. A checkpoint in FP8 or NF4 is taken as
    it is, if the precision is the same.

    Raises:
        ConfigError: it is not a checkpoint of this model, or is quantised in another way.
    """
    folder = located(folder, precision)
    checkpoint.require_model(folder, model)
    found = checkpoint.stored(folder)
    if found is not Stored.plain and found.name != precision.name:
        raise ConfigError(
            f"the weights are in {found.name.upper()}, and generation is asked for {precision.name}",
            where=str(folder),
            fix=f"set the task's weights to {found.name}, or name a conversion that was made without --{found.name}",
        )
    return _Loader(Reader(folder), model, precision, tp, rank, device).weights(found)


def located(folder: Path, precision: WeightPrecision) -> Path:
    """Return the folder of the checkpoint; of a Hugging Face folder, the conversion that suits the precision best."""
    if not (folder / "config.json").exists() or (folder / "metadata.json").exists():
        return folder
    suited = folder / checkpoint.FOLDERS.get(Stored.__members__.get(precision.name, Stored.plain), checkpoint.CONVERTED)
    return suited if suited.exists() else folder / checkpoint.CONVERTED


class _Loader:
    """Reads the parts of a TP rank."""

    def __init__(self, reader: Reader, model: Model, precision: WeightPrecision, tp: int, rank: int, device: torch.device) -> None:
        self.reader, self.model, self.precision, self.dtype = reader, model, precision, dtype_of(precision)
        self.tp, self.rank, self.device = tp, rank, device

    def weights(self, found: Stored) -> Weights:
        m, dtype = self.model, self.dtype
        table = (m.vocab_size, m.hidden_size)
        linear = {Stored.plain: self._quantized, Stored.fp8: self._fp8, Stored.nf4: self._nf4}[found]
        embedding_VH = self._part(_EMBEDDING, table, axis=0, dtype=dtype).to(self.device)
        layers = [self._layer(i, linear) for i in range(m.num_layers)]
        norm_H = self._part(_NORM, (m.hidden_size,), axis=None, dtype=dtype).to(self.device)
        if m.tied_embeddings:
            return Weights(embedding_VH, layers, norm_H, Linear(embedding_VH))
        head = Linear(self._part(_HEAD, table, axis=0, dtype=dtype).to(self.device))
        return Weights(embedding_VH, layers, norm_H, head)

    def _layer(self, index: int, linear: Callable[[str, int], Linear]) -> Layer:
        m, dtype = self.model, self.dtype
        norms = {
            name: self._of_layer(f"{_LAYERS}{key}.weight", index, (m.hidden_size,), axis=None, dtype=dtype)
            for name, key in _NORMS.items()
        }
        linears = {name: linear(name, index) for name in _LINEARS}
        return Layer(**{name: x.to(self.device) for name, x in norms.items()}, **linears)

    def _quantized(self, name: str, index: int) -> Linear:
        """Return a linear that is stored without quantisation."""
        whole = self._linear(name, index, "weight", dtype=self.dtype)
        return stored(whole.to(self.device), self.precision)

    def _fp8(self, name: str, index: int) -> Linear:
        """Return a linear in FP8; all of its rows have the scale of the weight."""
        values_OI = self._linear(name, index, quantize.STORED, dtype=quantize.FP8).to(self.device)
        scale = self._of_layer(f"{_LAYERS}{_LINEARS[name]}.{quantize.STORED_SCALE}", index, (1,), axis=None)
        return Linear(values_OI, scale.to(self.device).expand(len(values_OI)).contiguous())

    def _nf4(self, name: str, index: int) -> Linear:
        """Return a linear in NF4; its absmax are rounded to 8 bits, as training rounds them."""
        codes = self._linear(name, index, nf4.STORED, dtype=torch.uint8, per_number=2)
        absmax_OK = self._linear(name, index, nf4.STORED_ABSMAX, dtype=quantize.BF16, per_number=nf4.BLOCK)
        return from_nf4(nf4.Nf4(codes.to(self.device), *nf4.quantize_absmax(absmax_OK.to(self.device))))

    def _linear(self, name: str, index: int, suffix: str, *, dtype: torch.dtype, per_number: int = 1) -> Tensor:
        """Return this rank's part of a tensor whose rows have a number for every `per_number` weights."""
        num_out, num_in = shapes(self.model, 1)[name]
        key, whole = f"{_LAYERS}{_LINEARS[name]}.{suffix}", (num_out, num_in // per_number)
        if name in _SPLIT_BY_COLUMN:
            return self._of_layer(key, index, whole, axis=1, dtype=dtype)
        pieces = 2 if name == "fc1" else 1  # gates and ups are split over the ranks one by one
        return self._of_layer(key, index, whole, axis=0, dtype=dtype, pieces=pieces)

    def _of_layer(
        self,
        key: str,
        index: int,
        whole: tuple[int, ...],
        *,
        axis: int | None,
        dtype: torch.dtype = torch.float32,
        pieces: int = 1,
    ) -> Tensor:
        """Return this rank's part of a tensor of one layer; a checkpoint holds those of all layers as one."""
        stacked = (self.model.num_layers, *whole)
        split = None if axis is None else axis + 1
        return self._part(key, stacked, axis=split, dtype=dtype, layer=index, pieces=pieces)[0]

    def _part(
        self,
        key: str,
        whole: tuple[int, ...],
        *,
        axis: int | None,
        dtype: torch.dtype,
        layer: int | None = None,
        pieces: int = 1,
    ) -> Tensor:
        extent, offset = list(whole), [0] * len(whole)
        if layer is not None:
            extent[0], offset[0] = 1, layer
        if axis is None:
            return self._read(key, whole, [tuple(offset)], tuple(extent), dtype)[0]
        piece = whole[axis] // pieces
        extent[axis] = piece // self.tp
        offsets = [
            tuple(i * piece + self.rank * extent[axis] if d == axis else at for d, at in enumerate(offset))
            for i in range(pieces)
        ]
        return torch.cat(self._read(key, whole, offsets, tuple(extent), dtype), dim=axis)

    def _read(self, key, whole, offsets, extent, dtype) -> list[Tensor]:
        boxes = [Wanted(key, whole, offset, torch.empty(extent, dtype=dtype)) for offset in offsets]
        self.reader.read(boxes)
        return [box.into for box in boxes]
