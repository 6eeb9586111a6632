"""Whether prepared rows and a checkpoint are there and whole, from headers, names and sizes."""

import ast
import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import checkpoint as checkpoints
from bench.contract import file_content, llama_config
from bench.contract.layers import differs_from_llama
from bench.contract.schema import Config, Data
from bench.contract.task import Model
from bench.errors import ConfigError
from bench.rules.check import Finding, broken

MANIFEST = "manifest.json"
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
HASHED_BYTES = 2**20
"""Larger files are compared by size: a login node is no place to read a terabyte."""
NPY = b"\x93NUMPY"
DTYPES = {"tokens": (re.compile(r"[<>|=][iu][1248]"), "whole numbers"), "counts": (re.compile(r"\|[biu]1"), "bool")}
"""Of NAME_tokens.npy and NAME_counts.npy: what the ranks can read, and what one calls it."""


@dataclass(frozen=True, slots=True)
class Npy:
    """What the header of an .npy file says."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    """Of the whole file, by shape and dtype."""


def rows(folder: Path, want: Data) -> Iterator[Finding]:
    """Yield in what prepared rows are not those of the plan."""
    if not (folder / "train_tokens.npy").exists():
        fix = "point DATADIR at the prepared rows; python -m jobs.tasks.convert rows makes them (docs/weights.md)"
        yield broken("CFG-06", f"no rows of {want.name}", str(folder / "train_tokens.npy"), fix=fix)
        return
    for name, count in (("train", want.train_rows), ("eval", want.eval_rows)):
        for part, (dtype, kind) in DTYPES.items():
            path, shape = folder / f"{name}_{part}.npy", (count, want.seq_length)
            fix = f"prepare {want.name} again, or correct data.{name}_rows and data.seq_length"
            try:
                header = npy(path)
            except (OSError, ValueError) as error:
                yield broken("CFG-06", f"{path.name} cannot be read: {_reason(error)}", str(path), fix=fix)
                continue
            if header.shape != shape:
                yield broken("CFG-06", f"{path.name} is {header.shape}, and the plan says {shape}", str(path), fix=fix)
            elif not dtype.fullmatch(header.dtype):
                yield broken("CFG-06", f"{path.name} holds {header.dtype}, and {part} are {kind}", str(path), fix=fix)
            elif (size := path.stat().st_size) != header.num_bytes:
                what = f"{path.name} has {size:,} bytes, and its header means {header.num_bytes:,}"
                yield broken("CFG-06", what, str(path), fix="copy it again: it is not whole")


def npy(path: Path) -> Npy:
    """Return what an .npy file's header says. Source: numpy.lib.format, versions 1.0 to 3.0.

    Raises:
        ValueError: it is not an .npy file, or its header is damaged.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if start[:6] != NPY or len(start) < 8:
            raise ValueError("not an .npy file")
        size, kind = (2, "<H") if start[6] == 1 else (4, "<I")
        length = struct.unpack(kind, file.read(size).ljust(size, b"\0"))[0]
        text = file.read(min(length, 2**16)).decode("utf-8", errors="replace")
    try:
        header = ast.literal_eval(text)
        shape, dtype = tuple(map(int, header["shape"])), str(header["descr"])
    except (SyntaxError, ValueError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError("its header is damaged") from error
    count = 1
    for extent in shape:
        count *= extent
    width = int(dtype[2:]) if dtype[2:].isdecimal() else 0
    return Npy(shape, dtype, 8 + size + length + count * width)


def checkpoint(folder: Path, config: Config) -> Iterator[Finding]:
    """Yield whether a folder holds no checkpoint that the run can load; a Hugging Face folder holds its conversion."""
    model = config.model
    there = checkpoints.located(folder, config)
    if checkpoints.is_source(there):
        yield from _hugging_face(there, model)
        return
    path = there / "metadata.json"
    if there != folder and not path.exists():
        wanted = checkpoints.wanted(config)
        flag = "" if wanted is checkpoints.Stored.plain else f" --{wanted.name}"
        command = f"python -m jobs.tasks.convert weights plan.json {folder} FOLDER{flag}"
        fix = f"{command}, then export MODEL=FOLDER (docs/weights.md)"
        yield broken("CFG-06", f"Hugging Face weights of {model.name}, not converted", str(folder), fix=fix)
        return
    if not path.exists():
        fix = "point MODEL at the folder that holds its metadata.json"
        yield broken("CFG-06", f"no megatron-core checkpoint of {model.name}", str(folder), fix=fix)
        return
    try:
        metadata = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield broken("CFG-06", f"metadata.json cannot be read: {_reason(error)}", str(path))
        return
    if not isinstance(metadata, dict) or "sharded_backend" not in metadata:
        yield broken("CFG-06", "metadata.json is not that of a megatron-core checkpoint", str(path))
    try:
        checkpoints.require(there, config)
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)


def _hugging_face(folder: Path, model: Model) -> Iterator[Finding]:
    """Yield whether a folder's config.json is not that of a Llama's plan, or safetensors are missing.

    Ranks compare the shapes of weights, and what a GPT-2 says of itself.
    """
    index = folder / SAFETENSORS_INDEX
    try:
        config = json.loads((folder / checkpoints.SOURCE).read_text())
        if not differs_from_llama(model):
            llama_config.check(config, model, where=str(folder / checkpoints.SOURCE))
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {SAFETENSORS}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "download the model's config.json, *.safetensors and their index again"
        yield broken("CFG-06", f"this Hugging Face folder cannot be read: {_reason(error)}", str(folder), fix=fix)
        return
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)
        return
    if missing := sorted(name for name in files if not (folder / name).is_file()):
        fix = "download the model's *.safetensors; pickled *.bin weights are not read"
        yield broken("CFG-06", f"{len(missing)} of {len(files)} files are missing: {missing[0]}", str(folder), fix=fix)


def manifest(folder: Path) -> Iterator[Finding]:
    """Yield in what the files of a folder are not those of its manifest.json, [{path, bytes, sha256?}, …]."""
    path = folder / MANIFEST
    if not path.exists():
        return
    try:
        listed = json.loads(path.read_text())
        entries = [(str(entry["path"]), int(entry["bytes"]), entry.get("sha256")) for entry in _entries(listed)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fix = "write it as a list of {path, bytes, sha256}"
        yield broken("CFG-06", f"{MANIFEST} cannot be read: {_reason(error)}", str(path), fix=fix)
        return
    wrong = [why for entry in entries if (why := difference(folder, *entry))]
    if wrong:
        more = f"; {len(wrong) - 1} more" if wrong[1:] else ""
        what = f"{len(wrong)} of {len(entries)} files are not as {MANIFEST} has them: {wrong[0]}{more}"
        yield broken("CFG-06", what, str(path), fix="copy them again from where they come from")


def _entries(manifest: Any) -> Any:
    return manifest["files"] if isinstance(manifest, dict) and "files" in manifest else manifest


def difference(folder: Path, name: str, size: int, digest: Any) -> str:
    """Return in what a file is not as described, or nothing."""
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if (there := path.stat().st_size) != size:
        return f"{name} has {there:,} bytes instead of {size:,}"
    if digest and size <= HASHED_BYTES and file_content.sha256(path) != digest:
        return f"{name} has another sha256"
    return ""


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
