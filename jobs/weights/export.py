"""Export a trained model as a Hugging Face folder, tensor by tensor: config.json, safetensors and their index."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from bench.contract import checkpoint, codec, families
from bench.contract.atomic_files import atomic_folder
from bench.contract.described_model import Described
from bench.contract.families import Weight
from bench.contract.model import Model
from bench.contract.training import Trains
from bench.errors import ConfigError
from jobs.ranks.progress import tracked
from jobs.weights import tensor_map
from jobs.weights.checkpoint_reader import Reader, Wanted
from jobs.weights.source import DTYPES, INDEX, SHARD_BYTES, SINGLE

TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json"),
)
"""Files of a tokenizer that are copied if they exist."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """One file, and its weights."""

    file: str
    weights: list[Weight]


def export(source: Path, folder: Path, *, tokenizer: Path | None = None, keep_fp32: bool = False) -> str:
    """Write the model of a trial's checkpoint; return a line with its folder and size.

    It is written in the precision of the trial's layers, or with keep_fp32 in that of the master weights.

    Raises:
        ConfigError: not such a checkpoint, no such model in transformers, an existing folder or too little disk space.
    """
    model, precision = _described(source)
    dtype = torch.float32 if keep_fp32 or precision == "fp32" else torch.bfloat16
    if folder.exists():
        raise ConfigError("this folder already exists", where=str(folder), fix="give a folder that does not exist")
    copied = [] if tokenizer is None else _tokenizer(tokenizer)
    if model.described is not None:
        return _export_described(source, folder, model.described, dtype, copied)
    family = families.of_model(model)
    shards = _shards(family.weights(model), dtype)
    num_bytes = sum(_num_bytes(weight, dtype) for shard in shards for weight in shard.weights)
    _require_room(folder, num_bytes)
    reader = Reader(source)
    with atomic_folder(folder) as part:
        for shard in tracked(shards, what="written", total=len(shards), unit="files", write=_print_line):
            _write(part / shard.file, shard, reader, model, dtype)
        if shards[1:]:
            names = {name: shard.file for shard in shards for weight in shard.weights for name in weight.sources}
            index = {"metadata": {"total_size": num_bytes}, "weight_map": names}
            (part / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        config = family.config_of(model) | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for path in copied:
            shutil.copy(path, part / path.name)
    return f"{folder}: {config['architectures'][0]} in {config['torch_dtype']}, {_size(num_bytes)}"


def _export_described(source: Path, folder: Path, described: Described, dtype: torch.dtype, copied: list[Path]) -> str:
    """Write a model that transformers describes; its checkpoint has transformers' names."""
    transformers_folder: Any = import_module("jobs.engines.huggingface.described.transformers_folder")
    reader, name = Reader(source), str(dtype).removeprefix("torch.")
    model = transformers_folder.meta_model(described)
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    num_bytes = described.parameters * dtype.itemsize
    _require_room(folder, num_bytes)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key, shape in parameters.items():
            data = torch.empty(shape, dtype=dtype)
            reader.read([Wanted(key, shape, (0,) * len(shape), data)])
            yield key, data

    with atomic_folder(folder) as part:
        transformers_folder.write(part, described, tensors(), dtype=name)
        for path in copied:
            shutil.copy(path, part / path.name)
    return f"{folder}: {described.architecture} in {name}, {_size(num_bytes)}"


def _print_line(line: str, to: TextIO = sys.stderr) -> None:
    print(line, file=to, flush=True)


def _described(source: Path) -> tuple[Model, str]:
    """Return the model of a checkpoint and the precision of its layers, from its manifest."""
    manifest = checkpoint.manifest(source)
    try:
        training, model = manifest["training"], codec.typed(Model, manifest["model"])
        trains, precision = training["same"]["trains"], training["precision"]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "this folder is not a checkpoint of a trial",
            where=str(source),
            fix="give RUN/checkpoints/trial_K/step_N of a run with task.training.checkpoint_every_steps",
        ) from error
    if trains != Trains.all.name:
        raise ConfigError(
            f"this checkpoint has only adapters (task.training.trains={trains}), but the export needs a whole model",
            where=str(source),
            fix="run `python -m jobs.tasks.convert adapters` to export the adapters",
        )
    return model, precision


def _shards(weights: list[Weight], dtype: torch.dtype) -> list[Shard]:
    """Return the files, each with at most SHARD_BYTES, or with a single larger weight."""
    groups: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        size += _num_bytes(weight, dtype)
        if groups[-1] and size > SHARD_BYTES:
            groups.append([])
            size = _num_bytes(weight, dtype)
        groups[-1].append(weight)
    if not groups[1:]:
        return [Shard(SINGLE, groups[0])]
    return [Shard(f"model-{n:05}-of-{len(groups):05}.safetensors", group) for n, group in enumerate(groups, 1)]


def _write(path: Path, shard: Shard, reader: Reader, model: Model, dtype: torch.dtype) -> None:
    """Write a safetensors file: 8 bytes with the length of a JSON header, the header, the tensors one after the other.

    Source: huggingface/safetensors, README, Format.
    """
    header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
    for name, shape in ((name, shape) for weight in shard.weights for name, shape in weight.sources.items()):
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in shard.weights:
            parts = _parts(reader, weight, model, dtype)
            for part, shape in zip(parts, weight.sources.values(), strict=True):
                assert part.shape == shape, f"{weight.key} has shape {tuple(part.shape)} instead of {shape}"
                file.write(part.contiguous().flatten().view(torch.uint8).numpy().data)


def _parts(reader: Reader, weight: Weight, model: Model, dtype: torch.dtype) -> list[Tensor]:
    """Return the exported tensors of a weight. A checkpoint of engine=huggingface already has transformers' names."""
    if not all(name in reader.names() for name in weight.sources):
        return tensor_map.parts(weight, _read(reader, weight).to(dtype), model)
    parts = [torch.empty(shape, dtype=dtype) for shape in weight.sources.values()]
    boxes = zip(weight.sources.items(), parts, strict=True)
    reader.read(Wanted(name, shape, (0,) * len(shape), part) for (name, shape), part in boxes)
    return parts


def _read(reader: Reader, weight: Weight) -> Tensor:
    """Return megatron-core's tensor; for stacked tensors, that of one layer, or of one of its experts."""
    whole = reader.stored(weight.key).whole
    shape = whole[len(weight.index) :]
    data = torch.empty((1,) * len(weight.index) + shape)
    reader.read([Wanted(weight.key, whole, (*weight.index, *(0 for _ in shape)), data)])
    return data.view(shape)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _num_bytes(weight: Weight, dtype: torch.dtype) -> int:
    return sum(torch.Size(shape).numel() for shape in weight.sources.values()) * dtype.itemsize


def _tokenizer(folder: Path) -> list[Path]:
    files = [folder / name for name in TOKENIZER if (folder / name).is_file()]
    if not files:
        fix = "give the Hugging Face folder of the tokenizer that was used for the rows"
        raise ConfigError("the folder contains no tokenizer", where=str(folder), fix=fix)
    return files


def _require_room(folder: Path, num_bytes: int) -> None:
    parent = next(path for path in folder.absolute().parents if path.exists())
    if num_bytes > (free := shutil.disk_usage(parent).free):
        raise ConfigError(
            f"only {_size(free)} are free, but the model needs {_size(num_bytes)}",
            where=str(parent),
            fix="free disk space, or give a folder on another disk",
        )
