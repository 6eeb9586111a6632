"""Write a megatron-core checkpoint (torch_dist) file by file, without the whole model in memory, for any layout.

Each file has complete pieces of global tensors, one after the other, in the format of torch.save; `.metadata` has the
location of each piece. Source: megatron-core 0.16.1, dist_checkpointing; torch 2.13, distributed.checkpoint.filesystem.
"""

import hashlib
import json
import os
import pickle
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bench.contract import atomic_files, checksums
from bench.contract.checkpoint import MANIFEST
from jobs.weights import checkpoint_reader

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
COMMON = {"common_backend": "torch", "common_backend_version": 1}
BESIDES = (checkpoint_reader.FILE, "common.pt", "metadata.json")
"""The files of a checkpoint besides its tensors."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a global tensor; the first axis of stacked tensors is the layer."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a piece: its bytes in a file."""

    key: str
    dtype: str
    whole: list[int]
    offset: list[int]
    shape: list[int]
    begin: int
    length: int


class _Hashed:
    """Hashes a file while it is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest, self.position = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.position += (count := self.file.write(data))
        return count

    def flush(self) -> None:
        self.file.flush()


def write(path: Path, pieces: Iterable[Piece]) -> dict[str, Any]:
    """Write a file atomically and sync it to disk; return its bytes, sha256 and the places of its pieces."""
    unfinished, places = path.with_name(path.name + ".tmp"), []
    with unfinished.open("wb") as file:
        hashed = _Hashed(file)
        for piece in pieces:
            begin, dtype = hashed.position, str(piece.data.dtype).removeprefix("torch.")
            whole = piece.data.clone()  # a view would be saved with its whole storage
            torch.save(whole, hashed)  # type: ignore[arg-type]  # torch only calls write and flush
            shape, length = list(piece.data.shape), hashed.position - begin
            places.append(Place(piece.key, dtype, list(piece.whole), list(piece.offset), shape, begin, length))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    digest, size = hashed.digest.hexdigest(), hashed.position
    return {"path": path.name, "bytes": size, "sha256": digest, "places": [asdict(place) for place in places]}


def close(folder: Path, files: Iterable[dict[str, Any]]) -> None:
    """Write the files that turn a folder of written pieces into a checkpoint."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        for place in (Place(**fields) for fields in file["places"]):
            properties = TensorProperties(dtype=getattr(torch, place.dtype))
            known = tensors.setdefault(place.key, TensorStorageMetadata(properties, torch.Size(place.whole), []))
            offset = torch.Size(place.offset)
            known.chunks.append(ChunkStorageMetadata(offset, torch.Size(place.shape)))
            storage[MetadataIndex(place.key, offset)] = _StorageInfo(file["path"], place.begin, place.length)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({**tensors}, storage_data=storage)))
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(BACKEND | COMMON))


def complete(folder: Path, about: dict[str, Any]) -> None:
    """Turn a folder into a checkpoint, once every rank has written to it; `about` goes into its manifest."""
    records = [json.loads(path.read_text()) for path in folder.glob("rank_*.json")]
    close(folder, records)
    files = [{key: record[key] for key in ("path", "bytes", "sha256")} for record in records]
    files += checksums.described(folder, BESIDES)
    atomic_files.write(folder / MANIFEST, {"version": 1, **about, "files": files})
    for path in folder.glob("rank_*.json"):
        path.unlink()
