"""Convert a Hugging Face folder to a megatron-core checkpoint, one unit at a time.

FOLDER.part has the finished files, a record of each, and their origin; it is renamed to FOLDER when it is complete. If
the process is killed, the next one continues after the last record.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.contract import checkpoint, checksums, families, hugging_face
from bench.contract.checkpoint import FOLDERS, MANIFEST, Stored
from bench.contract.families import Unit, Weight
from bench.contract.model import Model
from bench.contract.plan import fingerprint
from bench.errors import ConfigError
from jobs.engines.megatron import quantize
from jobs.ranks.progress import Progress
from jobs.weights import checkpoint_writer, nf4, tensor_map
from jobs.weights.source import Source, open_source, sha256

VERSION = 1
"""The version of the output; a conversion that was started with another version starts again."""
LOCK, ORIGIN, RECORDS = ".lock", "origin.json", "records"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Source, target and units of a conversion, before any weight is read."""

    source: Source
    model: Model
    folder: Path
    units: list[Unit]
    derived: list[str]
    stored: Stored

    @property
    def part(self) -> Path:
        return self.folder.with_name(self.folder.name + ".part")

    @property
    def origin(self) -> dict[str, Any]:
        """The origin of the files in FOLDER.part; only the same conversion may continue."""
        stats = [(name, (self.source.folder / name).stat()) for name in self.source.files]
        files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
        return {"version": VERSION, "model": fingerprint(self.model), "files": files, "stored": self.stored.name}


def prepare(source: Path, model: Model, folder: Path | None = None, *, stored: Stored = Stored.plain) -> Conversion:
    """Return the conversion of a Hugging Face folder; by default it writes to a new folder inside it.

    stored: how the linears of the layers are quantised, as the engine would on loading.

    Raises:
        ConfigError: config.json or a tensor's name, shape or dtype does not match the model; or NF4 does not fit.
    """
    opened = open_source(source)
    families.check(opened.config, model, where=str(source / "config.json"))
    widths = sorted({model.hidden_size, model.q_size, model.ffn_hidden_size})
    if stored is Stored.nf4 and any(width % nf4.BLOCK for width in widths):
        sizes = f"the rows of {model.name} have {' and '.join(map(str, widths))} weights"
        what = f"NF4 needs rows with a multiple of {nf4.BLOCK} weights, but {sizes}"
        raise ConfigError(what, where=str(source / "config.json"), fix="convert without --nf4")
    units = families.of_model(model).units(model, fused=hugging_face.is_fused(opened.tensors))
    to = folder or source / FOLDERS[stored]
    unused = hugging_face.check_tensors(opened.tensors, units, where=str(source))
    hugging_face.check_dtypes({name: x for name, x in opened.tensors.items() if name not in unused}, where=str(source))
    return Conversion(opened, model, to.absolute(), units, unused, stored)


def convert(conversion: Conversion, *, workers: int = 1) -> bool:
    """Write the checkpoint; return whether there was anything to do."""
    with locked(conversion) as is_needed:
        if is_needed:
            work(conversion, workers=workers)
            finish(conversion)
    return is_needed


@contextmanager
def locked(conversion: Conversion) -> Iterator[bool]:
    """Hold the folder's lock, and yield whether there is work to do: another process may have finished it.

    Raises:
        ConfigError: the folder has other content, cannot be written, or the disk is too small.
    """
    part, folder = conversion.part, conversion.folder
    while not folder.exists():
        try:
            part.mkdir(parents=True, exist_ok=True)
            lock = (part / LOCK).open("w")
        except OSError as error:
            raise _cannot_write(conversion, error) from error
        with lock:
            _wait_for(lock.fileno(), part)
            if not (part / LOCK).exists() or not os.path.samestat(os.fstat(lock.fileno()), (part / LOCK).stat()):
                continue  # the process that held the lock has finished, or has restarted
            _tidy(conversion)
            _require_room(conversion)
            yield True
            return
    _require_same(conversion)
    yield False


def work(conversion: Conversion, *, workers: int) -> None:
    """Hash each shard and convert each unit that has no record yet.

    A worker holds one fused tensor, its parts and a copy of a piece: for Llama-2-70B, 2.1 GiB were measured to BF16 and
    2.2 GiB to FP8.
    """
    records = conversion.part / RECORDS
    shards = {name: partial(_hash_shard, conversion, name) for name in conversion.source.files}
    units = {unit.name: partial(_convert_unit, conversion, unit) for unit in conversion.units}
    tasks = units | shards
    missing = [(name, task) for name, task in tasks.items() if not (records / f"{name}.json").exists()]
    log.info("%d of %d tasks to do in %s", len(missing), len(tasks), conversion.part)
    gib = {
        unit.name: sum(_num_bytes(conversion, weight) for weight in unit.weights) / 2**30 for unit in conversion.units
    }
    gib |= {name: (conversion.source.folder / name).stat().st_size / 2**30 for name in shards}
    progress = Progress("written and hashed", sum(gib[name] for name, _ in missing), "GiB")
    pool = ThreadPoolExecutor(workers)
    try:
        for name in pool.map(partial(_recorded, records), *zip(*missing, strict=True)) if missing else ():
            progress.add(gib[name])
            log.info("%s; %s", name, progress.line())
    finally:
        pool.shutdown(cancel_futures=True)


def finish(conversion: Conversion) -> None:
    """Turn the converted units into a checkpoint, and rename it to its final name."""
    part, source = conversion.part, conversion.source
    records = {path.stem: json.loads(path.read_text()) for path in (part / RECORDS).glob("*.json")}
    written = [records[unit.name] for unit in conversion.units]
    checkpoint_writer.close(part, written)
    manifest = {
        "version": VERSION,
        "model": checkpoint.model_of(conversion.model),
        **({} if conversion.stored is Stored.plain else {"precision": conversion.stored.name}),
        "source": {
            "folder": str(source.folder.absolute()),
            "config": source.config,
            "files": [records[name] for name in source.files],
            "tensors": len(source.tensors) - len(conversion.derived),
            "left_out": conversion.derived,
        },
        "files": [
            *({key: file[key] for key in ("path", "bytes", "sha256")} for file in written),
            *checksums.described(part, checkpoint_writer.BESIDES),
        ],
    }
    (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(part / RECORDS)
    (part / ORIGIN).unlink()
    (part / LOCK).unlink()
    part.rename(conversion.folder)


def _convert_unit(conversion: Conversion, unit: Unit) -> dict[str, Any]:
    return checkpoint_writer.write(conversion.part / f"{unit.name}.distcp", _pieces(conversion, unit))


def _pieces(conversion: Conversion, unit: Unit) -> Iterator[checkpoint_writer.Piece]:
    """Yield the pieces of a unit's tensors, one tensor at a time."""
    for weight in unit.weights:
        data = tensor_map.fuse(weight, conversion.source.read(weight.sources), conversion.model)
        if conversion.stored is Stored.plain or not weight.is_linear:
            yield from _split(conversion, weight, weight.key, data)
        else:
            quantised = _in_fp8 if conversion.stored is Stored.fp8 else _in_nf4
            yield from quantised(conversion, weight, data)


def _in_fp8(conversion: Conversion, weight: Weight, data: Tensor) -> Iterator[checkpoint_writer.Piece]:
    """Yield a linear's scale, then its weight in FP8, rounded to BF16 first, as precision=fp8 does on loading."""
    assert weight.layer is not None and weight.axis is not None
    data, linear = data.to(quantize.BF16), weight.key.removesuffix("weight")
    parts = data.chunk(weight.num_pieces, weight.axis)
    scale = quantize.weight_scale(torch.stack([quantize.amax(part) for part in parts]).amax(0))
    layers = conversion.model.num_layers
    yield checkpoint_writer.Piece(linear + quantize.STORED_SCALE, (layers, 1), (weight.layer, 0), scale.unsqueeze(0))
    for piece in _split(conversion, weight, linear + quantize.STORED, data):
        yield replace(piece, data=quantize.quantize_weight(piece.data, scale))


def _in_nf4(conversion: Conversion, weight: Weight, data: Tensor) -> Iterator[checkpoint_writer.Piece]:
    """Yield a linear's 4-bit numbers and each block's absmax, of the weight rounded to BF16; blocks are not split."""
    assert weight.axis is not None
    linear = weight.key.removesuffix("weight")
    codes, absmax = nf4.quantize_blocks(data.to(quantize.BF16))
    blocks = replace(weight, num_pieces=gcd(weight.num_pieces, absmax.shape[weight.axis]))
    yield from _split(conversion, blocks, linear + nf4.STORED, codes)
    yield from _split(conversion, blocks, linear + nf4.STORED_ABSMAX, absmax)


def _split(conversion: Conversion, weight: Weight, key: str, data: Tensor) -> Iterator[checkpoint_writer.Piece]:
    whole, begin, index = tuple(data.shape), [0] * data.dim(), weight.index
    stack = _stack(conversion.model)[: len(index)]
    pieces = data.chunk(weight.num_pieces, weight.axis) if weight.axis is not None else [data]
    for piece in pieces:
        stacked = piece.view((1,) * len(index) + piece.shape)
        yield checkpoint_writer.Piece(key, (*stack, *whole), (*index, *begin), stacked)
        if weight.axis is not None:
            begin[weight.axis] += piece.shape[weight.axis]


def _stack(model: Model) -> tuple[int, ...]:
    """Return the sizes of the axes before those of one layer's, or one expert's, tensor."""
    return (model.num_layers, model.experts.num_experts) if model.experts else (model.num_layers,)


def _hash_shard(conversion: Conversion, name: str) -> dict[str, Any]:
    path = conversion.source.folder / name
    return {"path": name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def _recorded(records: Path, name: str, task: Callable[[], dict[str, Any]]) -> str:
    """Do a task and write its record atomically; return the task's name."""
    unfinished = records / f"{name}.tmp"
    unfinished.write_text(json.dumps(task()))
    unfinished.rename(records / f"{name}.json")
    return name


def _wait_for(lock: int, part: Path) -> None:
    """Take the lock; wait while another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("another process is converting into %s: waiting for it", part)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _tidy(conversion: Conversion) -> None:
    """Keep finished files of the same conversion, and remove everything else."""
    part, origin = conversion.part, json.dumps(conversion.origin)
    if not (part / ORIGIN).exists() or (part / ORIGIN).read_text() != origin:
        for path in part.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        (part / RECORDS).mkdir()
        (part / ORIGIN).write_text(origin)
    for path in (*part.glob("*.tmp"), *(part / RECORDS).glob("*.tmp")):
        path.unlink()


def _require_room(conversion: Conversion) -> None:
    records = conversion.part / RECORDS
    missing = [unit for unit in conversion.units if not (records / f"{unit.name}.json").exists()]
    need = sum(_num_bytes(conversion, weight) for unit in missing for weight in unit.weights)
    if need > (free := shutil.disk_usage(conversion.part).free):
        raise ConfigError(
            f"only {free / 2**30:.1f} GiB are free, but the checkpoint needs {need / 2**30:.1f} GiB",
            where=str(conversion.part),
            fix="free disk space, or give another FOLDER",
        )


def _num_bytes(conversion: Conversion, weight: Weight) -> int:
    """Return the size of a weight in the checkpoint, without the scale of one in FP8."""
    sources = [conversion.source.tensors[name] for name in weight.sources]
    if conversion.stored is Stored.plain or not weight.is_linear:
        return sum(stored.num_bytes for stored in sources)
    bits = 8 if conversion.stored is Stored.fp8 else 4 + 16 / nf4.BLOCK
    return int(sum(stored.num_elements for stored in sources) * bits / 8)


def _require_same(conversion: Conversion) -> None:
    """Refuse the folder unless it has this conversion, by the names, sizes, precision and model of its files."""
    folder, source = conversion.folder, conversion.source
    checkpoint.require_model(folder, conversion.model)
    try:
        files = {file["path"]: file["bytes"] for file in checkpoint.manifest(folder)["source"]["files"]}
    except (KeyError, TypeError):
        files = {}
    is_same = files == {name: (source.folder / name).stat().st_size for name in source.files}
    if not is_same or checkpoint.stored(folder) is not conversion.stored:
        content = "these weights in another precision" if is_same else "other content"
        raise ConfigError(
            f"the folder already has {content}",
            where=str(folder),
            fix="rename this folder, or give another FOLDER",
        )


def _cannot_write(conversion: Conversion, error: OSError) -> ConfigError:
    return ConfigError(
        f"the converted weights cannot be written into this folder: {error.strerror}",
        where=str(conversion.folder),
        fix="give a writable folder: python -m jobs.tasks.convert weights PLAN SOURCE FOLDER",
    )
