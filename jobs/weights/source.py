"""Read a Hugging Face folder: config.json, and the tensors of its *.safetensors by file, shape and dtype."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bench.contract import atomic_files
from bench.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Largest size of a file that is written, unless a single tensor is larger."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, slots=True)
class Stored:
    """File, shape and dtype of one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Source:
    """A Hugging Face folder: its config, its files and its tensors."""

    folder: Path
    config: dict[str, Any]
    files: list[str]
    tensors: dict[str, Stored]

    def read(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Read tensors into memory."""
        read = []
        for name in names:
            with safe_open(self.folder / self.tensors[name].file, framework="pt") as shard:
                read.append(shard.get_tensor(name))
        return read


def open_source(folder: Path) -> Source:
    """Return the tensors of a folder, from the headers of all its shards; no weight is read.

    Raises:
        ConfigError: no Hugging Face folder with safetensors, or a shard is missing, damaged or not as in the index.
    """
    config, index = _json(folder / "config.json"), None
    if (folder / INDEX).exists():
        index = _json(folder / INDEX).get("weight_map", {})
    elif not (folder / SINGLE).exists():
        raise ConfigError(
            "the folder contains no *.safetensors",
            where=str(folder / INDEX),
            fix="download the model's *.safetensors and their index; pickled *.bin weights are not supported",
        )
    files = sorted(set(index.values())) if index is not None else [SINGLE]
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(folder, file).items():
            if name in tensors:
                _refuse(folder / file, f"the tensor {name} is in two files, this file and {tensors[name].file}")
            tensors[name] = stored
    for name, file in (index or {}).items():
        if name not in tensors or tensors[name].file != file:
            _refuse(folder / file, f"the tensor {name} is missing, but {INDEX} lists it in this file")
    return Source(folder, config, files, tensors)


def sha256(path: Path) -> str:
    """Return a shard's sha256, checked against its file name in a Hugging Face cache.

    Raises:
        ConfigError: they differ.
    """
    digest = atomic_files.sha256(path)
    blob = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", blob) and blob != digest:
        _refuse(path, f"the SHA-256 of the file is {digest}, but its name in the cache is {blob}")
    return digest


def _header(folder: Path, file: str) -> dict[str, Stored]:
    try:
        with safe_open(folder / file, framework="pt") as shard:
            views = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 - it is not a mapping
            return {name: Stored(file, tuple(v.get_shape()), v.get_dtype()) for name, v in views.items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"a shard cannot be read: {error}",
            where=str(folder / file),
            fix="download this file again, because it is incomplete",
        ) from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("the file is not a JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            fix="give a Hugging Face folder with config.json and *.safetensors",
        ) from error
    return content


def _refuse(path: Path, what: str) -> None:
    raise ConfigError(f"{path.name}: {what}", where=str(path), fix="download the model again to an empty folder")
