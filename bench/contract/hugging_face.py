"""A Hugging Face folder: its config.json, and the names and shapes of the tensors in its *.safetensors.

Only headers are read, no weights. Standard library only: login nodes and ranks import it.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bench.contract import described_model, families
from bench.contract.described_model import Described
from bench.contract.families import Unit
from bench.contract.model import Model
from bench.errors import ConfigError

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""The dtypes that the conversion reads."""
LONGEST_HEADER = 100_000_000
"""Bytes. Source: huggingface/safetensors, README, Format."""
DERIVED = ".rotary_emb.inv_freq"
"""A table in older checkpoints that every model computes itself."""
MOST_TABLES = 1024
"""Numbers of such tables in a layer, at most. Assumed."""
HEAD = "lm_head.weight"
"""Some folders of models with tied embeddings have a copy of them under this name, which transformers ignores."""


class MissingWeightsError(ConfigError):
    """A folder has no safetensors, or not all."""


@dataclass(frozen=True, slots=True)
class Stored:
    """File, shape and dtype of one tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """The number of its weights."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size of a tensor whose dtype is one of DTYPE_BYTES."""
        return self.num_elements * DTYPE_BYTES[self.dtype]


def config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        ConfigError: it is missing or damaged.
    """
    return _json(folder / CONFIG)


def tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of all shards, by name.

    Raises:
        ConfigError: there are no safetensors, or a shard is missing, damaged or not as in the index.
    """
    index = None
    if (folder / INDEX).exists():
        index = _json(folder / INDEX).get("weight_map", {})
        if not isinstance(index, dict) or not all(_is_file_name(file) for file in index.values()):
            raise _damaged(folder / INDEX, "weight_map must name a file of this folder for each tensor")
    elif not (folder / SINGLE).exists():
        raise MissingWeightsError(
            "the folder contains no *.safetensors",
            where=str(folder / INDEX),
            fix="download the model's *.safetensors and their index, because pickled *.bin weights are not supported; "
            "or, to measure only speed, set model.weights=random",
            rule="CFG-06",
        )
    files = sorted(set(index.values())) if index is not None else [SINGLE]
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise MissingWeightsError(
            f"{len(missing)} of {len(files)} files of the model are missing, for example {missing[0]}",
            where=str(folder),
            fix="download the model's *.safetensors again, because pickled *.bin weights are not supported",
            rule="CFG-06",
        )
    stored_tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(folder / file).items():
            if name in stored_tensors:
                raise _damaged(folder / file, f"the tensor {name} is also in the file {stored_tensors[name].file}")
            stored_tensors[name] = stored
    for name, file in (index or {}).items():
        if name not in stored_tensors or stored_tensors[name].file != file:
            raise _damaged(
                folder / file,
                f"{INDEX} lists the tensor {name} in this file, but the file does not contain this tensor",
            )
    return stored_tensors


def check(folder: Path, model: Model) -> None:
    """Refuse a folder whose config.json or tensors are not those of a model.

    Raises:
        ConfigError: they differ, or something is missing or damaged.
    """
    if model.described is not None:
        described_model.require_same(config(folder), model.described, where=str(folder / CONFIG))
        _check_number(tensors(folder), model, model.described, where=str(folder))
        return
    families.check(config(folder), model, where=str(folder / CONFIG))
    stored = tensors(folder)
    check_tensors(stored, families.of_model(model).units(model, fused=is_fused(stored)), where=str(folder))


def _check_number(stored: dict[str, Stored], model: Model, described: Described, *, where: str) -> None:
    """Refuse tensors with fewer or more numbers than the model has; a rank compares their names and shapes."""
    per_element = {"_blocks": 2, "_scales": 0} if described.is_mxfp4 else {}
    total = 0
    for name, one in stored.items():
        total += one.num_elements * next((n for end, n in per_element.items() if name.endswith(end)), 1)
    copies = model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    is_more = total > described.parameters + copies + MOST_TABLES * model.num_layers and not described.ignores_tensors
    if total < described.parameters or is_more:
        raise ConfigError(
            f"the weight files contain {total:,} numbers, but the model in config.json has "
            f"{described.parameters:,} parameters",
            where=where,
            fix="download the weights again, or correct config.json",
            rule="CFG-06",
        )


def is_fused(stored: dict[str, Stored]) -> bool:
    """Return whether q, k and v are one tensor, as in MLPerf's Llama-2-70B."""
    return "model.layers.0.self_attn.qkv_proj.weight" in stored


def check_tensors(stored: dict[str, Stored], units: Iterable[Unit], *, where: str) -> list[str]:
    """Return the names of the tensors that are not read because every model computes them.

    Raises:
        ConfigError: another tensor is missing or unknown, or has another shape.
    """
    wanted = {name: tuple(shape) for unit in units for weight in unit.weights for name, shape in weight.sources.items()}
    unused = sorted(name for name in stored if name.endswith(DERIVED) or (name == HEAD and name not in wanted))
    used = {name: one for name, one in stored.items() if name not in unused}
    shapes = [
        f"{name} has shape {one.shape} instead of {wanted[name]}"
        for name, one in used.items()
        if name in wanted and one.shape != wanted[name]
    ]
    for wrong, problem in (
        (sorted(wanted.keys() - used.keys()), "are missing"),
        (sorted(used.keys() - wanted.keys()), "are unknown"),
        (shapes, "have another shape"),
    ):
        if wrong:
            examples = ", ".join([*wrong[:3], *("…" for _ in wrong[3:4])])
            raise ConfigError(
                f"{len(wrong)} of {len(wanted)} tensors {problem}: {examples}",
                where=where,
                fix="set model= to the model of these weights, or download the weights again",
                rule="CFG-06",
            )
    return unused


def check_dtypes(stored: dict[str, Stored], *, where: str) -> None:
    """Refuse tensors that the conversion cannot read, or of different dtypes."""
    if len(dtypes := {one.dtype for one in stored.values()}) != 1 or not dtypes <= DTYPE_BYTES.keys():
        raise ConfigError(
            f"the tensors have the dtypes {', '.join(sorted(dtypes))}, but all tensors must have the same supported "
            "dtype",
            where=where,
            fix=f"set MODEL to weights in which all tensors have one of the dtypes {', '.join(DTYPE_BYTES)}",
            rule="CFG-06",
        )


def _header(path: Path) -> dict[str, Stored]:
    """Return the tensors of one file: 8 bytes with the length of a JSON header, the header, then the data.

    Source: huggingface/safetensors, README, Format.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > LONGEST_HEADER:
                raise ValueError("the file has no header")
            entries = json.loads(file.read(length))
        if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
            raise ValueError("the header is not an object that describes each tensor")
        entries.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        size, expected_size = path.stat().st_size, 8 + length + end
        if size != expected_size:
            raise ValueError(f"the file has {size:,} bytes instead of {expected_size:,}")
        return {
            name: Stored(path.name, tuple(map(int, entry["shape"])), str(entry["dtype"]))
            for name, entry in entries.items()
        }
    except OSError as error:
        raise ConfigError(
            f"a file of the weights cannot be read: {error.strerror or error}",
            where=str(path),
            fix="check that the file system works, and that this user has read permission for the file",
            rule="CFG-06",
        ) from error
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"a file of the weights is incomplete or damaged: {error}",
            where=str(path),
            fix="download this file again",
            rule="CFG-06",
        ) from error


def _is_file_name(file: Any) -> bool:
    return isinstance(file, str) and Path(file).name == file


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("the file is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}",
            where=str(path),
            fix="give a Hugging Face folder with config.json and *.safetensors",
            rule="CFG-06",
        ) from error
    return content


def _damaged(path: Path, what: str) -> ConfigError:
    fix = "download the model again to an empty folder"
    return ConfigError(f"{path.name}: {what}", where=str(path), fix=fix, rule="CFG-06")
