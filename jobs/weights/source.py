"""Read the tensors of a Hugging Face folder."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bench.contract import atomic_files, hugging_face
from bench.contract.hugging_face import INDEX as INDEX
from bench.contract.hugging_face import SINGLE as SINGLE
from bench.contract.hugging_face import Stored
from bench.errors import ConfigError

SHARD_BYTES = 5 * 10**9
"""Largest size of a file that is written, unless a single tensor is larger."""
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


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
    config, tensors = hugging_face.config(folder), hugging_face.tensors(folder)
    return Source(folder, config, sorted({stored.file for stored in tensors.values()}), tensors)


def sha256(path: Path) -> str:
    """Return a shard's sha256, checked against its file name in a Hugging Face cache.

    Raises:
        ConfigError: they differ.
    """
    digest = atomic_files.sha256(path)
    blob = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", blob) and blob != digest:
        raise ConfigError(
            f"{path.name} is damaged: its SHA-256 is {digest}, but its name in the cache is the SHA-256 {blob}",
            where=str(path),
            fix="download the model again to an empty folder",
        )
    return digest
