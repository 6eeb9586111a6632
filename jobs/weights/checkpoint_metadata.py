"""The metadata of a distributed checkpoint, checked before torch reads it: a pickle, and pickles can run code."""

import pickle
from pathlib import Path
from typing import Any

import torch

from bench.errors import ConfigError

FILE = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_KNOWN = {
    f"{_CHECKPOINT}.metadata": (
        *("Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
}
"""What torch 2.13 and megatron-core 0.16.1 write, by module; none of it does more than hold values."""
_BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)
"""What unpickling raises on bytes that are no pickle, or not one of these classes."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads what metadata is made of, and refuses any other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, and reading that could run code")


def require_plain(folder: Path) -> None:
    """Do nothing if the metadata of a checkpoint holds nothing else, or if there is none.

    Raises:
        ConfigError: it names what is no part of metadata, or cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            _MetadataUnpickler(file).load()
    except _BROKEN as error:
        raise ConfigError(
            f"this is not the metadata of a checkpoint: {error}",
            where=str(path),
            fix="use a checkpoint that torch or megatron-core has saved, from somebody whom you trust",
            rule="CFG-06",
        ) from error
