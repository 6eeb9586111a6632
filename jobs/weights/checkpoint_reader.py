"""Read boxes of the tensors of a checkpoint (torch_dist), independent of the layout that saved them.

Stored pieces are read one at a time, each once, so that memory does not depend on the model's size.
"""

import io
import pickle
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

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
"""Allowed classes by module: those that torch 2.13 and megatron-core 0.16.1 write. They only hold values."""
_BROKEN = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)
"""Errors of unpickling on bytes that are not a pickle, or not one of these classes."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads the classes of metadata, and refuses any other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        raise pickle.UnpicklingError(f"the pickle refers to {module}.{name}, which could run code")


def _enum_member(kind: Any, name: Any) -> Enum:
    """Return a member of an enum; Python 3.11.0 to 3.11.3 pickles a member as a call of getattr.

    Raises:
        UnpicklingError: any other use of getattr, which could run code.
    """
    if isinstance(kind, EnumType) and name in kind.__members__:
        member: Enum = kind.__members__[name]
        return member
    raise pickle.UnpicklingError(f"the pickle calls getattr for {kind!r:.60}, and such a call could run code")


def require_plain(folder: Path) -> None:
    """Refuse the metadata of a checkpoint if it could run code.

    Raises:
        ConfigError: it refers to classes that are not part of metadata, or cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            _MetadataUnpickler(file).load()
    except _BROKEN as error:
        raise ConfigError(
            f"the file is not the metadata of a checkpoint: {error}",
            where=str(path),
            fix="use a checkpoint that torch or megatron-core saved, from a trusted source",
            rule="CFG-06",
        ) from error


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A box of a tensor, and the memory that it is read into, which may have another dtype."""

    key: str
    whole: Shape
    offset: Shape
    into: Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """Shape, dtype and stored pieces of one tensor."""

    whole: Shape
    dtype: torch.dtype
    pieces: list[tuple[Shape, Shape]]
    """Offset and shape of each."""


class Reader:
    """The tensors of one checkpoint.

    Raises:
        ConfigError: the folder is not a checkpoint, or one whose metadata could run code.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        require_plain(folder)
        try:
            self._metadata: Metadata = pickle.loads((folder / FILE).read_bytes())
        except OSError as error:
            raise _unreadable(folder, error.strerror or "the metadata cannot be read") from error

    def names(self) -> set[str]:
        """Return the keys of all tensors."""
        return set(self._metadata.state_dict_metadata)

    def stored(self, key: str) -> Stored:
        """Return shape, dtype and pieces of a tensor.

        Raises:
            ConfigError: there is no tensor of this name.
        """
        tensor = self._metadata.state_dict_metadata.get(key)
        if not isinstance(tensor, TensorStorageMetadata):
            raise _unreadable(self.folder, f"the checkpoint has no tensor {key}")
        pieces = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks]
        return Stored(tuple(tensor.size), tensor.properties.dtype, pieces)

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Fill the memory of each box.

        Raises:
            ConfigError: a tensor is missing, incomplete, or has another shape.
        """
        by_key: dict[str, list[Wanted]] = defaultdict(list)
        for box in wanted:
            by_key[box.key].append(box)
        for key, boxes in by_key.items():
            stored, num_read = self.stored(key), 0
            if any(stored.whole != box.whole for box in boxes):
                what = f"the tensor {key} has the shape {stored.whole}, but the model needs the shape {boxes[0].whole}"
                raise _unreadable(self.folder, what)
            for offset, shape in stored.pieces:
                needed = [(box, cut) for box in boxes if (cut := overlap(offset, shape, box.offset, box.into.shape))]
                piece = self._piece(key, offset) if needed else torch.empty(0)
                for box, cut in needed:
                    part = box.into[_inside(cut, box.offset)]
                    part.copy_(piece[_inside(cut, offset)])
                    num_read += part.numel()
            if num_read != sum(box.into.numel() for box in boxes):
                raise _unreadable(self.folder, f"parts of the tensor {key} are missing")

    def _piece(self, key: str, offset: Shape) -> Tensor:
        place = self._metadata.storage_data[MetadataIndex(key, torch.Size(offset))]
        try:
            with (self.folder / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                content = io.BytesIO(file.read(place.length))
                piece: Tensor = torch.load(content, map_location="cpu", weights_only=True)
                return piece
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise _unreadable(self.folder, f"{place.relative_path} is damaged: {str(error).splitlines()[0]}") from error


def overlap(offset: Shape, shape: Shape, other: Shape, other_shape: Shape) -> list[tuple[int, int]] | None:
    """Return begin and end of the overlap of two boxes, axis by axis; None without an overlap."""
    cut = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(offset, shape, other, other_shape, strict=True)]
    return cut if all(begin < end for begin, end in cut) else None


def _inside(cut: list[tuple[int, int]], offset: Shape) -> tuple[slice, ...]:
    return tuple(slice(begin - first, end - first) for (begin, end), first in zip(cut, offset, strict=True))


def _unreadable(folder: Path, what: str) -> ConfigError:
    fix = "give a checkpoint folder of a trial: RUN/checkpoints/trial_K/step_N"
    return ConfigError(f"this checkpoint cannot be used: {what}", where=str(folder), fix=fix, rule="CFG-06")
