"""Convert GovReport's published rows to the format of jobs/data/rows.py.

They are published in two formats: parquet (input_ids, labels; -100 if a token does not count), and NVIDIA's npy of the
same rows, a pickled list of {input_ids, loss_mask, seq_start_id}. Both have rows of one length, packed from many
reports. There is no document mask, so attention covers the whole row.

Source: MLPerf Training llama2_70b_lora, and NVIDIA's convert_dataset.py for it.
"""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.contract.atomic_files import atomic_folder
from bench.contract.checkpoint import MANIFEST
from bench.contract.schema import Data
from bench.errors import ConfigError
from jobs.data.rows import row_sha256
from jobs.data.writing import described
from jobs.ranks.progress import tracked

SPLITS = {"train": "train", "eval": "validation"}
"""Names of the splits here, and in the file names."""
NOT_COUNTED = -100
"""The label that the loss of transformers ignores."""
BATCH_ROWS = 64
PUBLISHED_BYTES = {"train.npy": 192_151_239, "validation.npy": 8_521_136}
"""The sizes of NVIDIA's npy of the official rows, as NumPy 1 pickles them; other versions differ by some bytes.

Source: NVIDIA's MLPerf submissions of llama2_70b_lora.
"""
Row = tuple[np.ndarray, np.ndarray]
"""The tokens, and which of them count."""


def convert(source: Path, folder: Path, *, data: Data, vocab_size: int) -> dict[str, Any]:
    """Write the rows of both splits into a new folder; return its manifest.

    Raises:
        ConfigError: the number of rows, their length or a token does not match the plan, or the files have no rows.
    """
    if folder.exists():
        raise ConfigError("this folder already exists", where=str(folder), fix="give a folder that does not exist")
    files = {name: _files(source, published) for name, published in SPLITS.items()}
    manifest: dict[str, Any] = {
        "data": data.name,
        "source": {"folder": str(source.absolute()), "files": []},
        "splits": {},
    }
    with atomic_folder(folder) as part:
        for name, paths in files.items():
            num_rows = data.num_train_rows if name == "train" else data.eval_rows
            shape, last = (num_rows, data.seq_length), paths[-1]
            manifest["splits"][name] = _write(part, name, _checked(paths, shape, vocab_size), shape=shape, where=last)
            manifest["source"]["files"] += [described(path) for path in paths]
        manifest["files"] = [described(path) for path in sorted(part.glob("*.npy"))]
        (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def _files(source: Path, split: str) -> list[Path]:
    """Return a split's files: NVIDIA's npy, or the parts of a parquet, in order."""
    if (source / f"{split}.npy").exists():
        return [source / f"{split}.npy"]
    for folder in (source, source / "data"):
        if files := sorted([*folder.glob(f"{split}-*.parquet"), *folder.glob(f"{split}.parquet")]):
            return files
    raise ConfigError(
        f"the folder has no file with the {split} rows of GovReport",
        where=str(source),
        fix=f"give a folder with {split}-00000-of-00001.parquet or {split}.npy",
    )


def _write(part: Path, name: str, rows: Iterator[Row], *, shape: tuple[int, int], where: Path) -> dict[str, Any]:
    """Write a split row by row; return its numbers of rows, of tokens, and of tokens that count."""
    written, counted, sha256 = 0, 0, list[bytes]()
    with (part / f"{name}_tokens.npy").open("wb") as tokens, (part / f"{name}_counts.npy").open("wb") as counts:
        for file, descr in ((tokens, "<i4"), (counts, "|b1")):
            header = {"descr": descr, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
        for written, (row, mask) in enumerate(tracked(rows, what=f"{name} rows", total=shape[0], unit="rows"), 1):
            if written <= shape[0]:
                row = row.astype("<i4")
                tokens.write(row.tobytes())
                counts.write(mask.tobytes())
                counted += int(mask.sum())
                sha256.append(row_sha256(row, mask))
    if written != shape[0]:
        _refuse(where, f"the file has {written:,} rows, but the plan needs {shape[0]:,} {name} rows")
    np.save(part / f"{name}_sha256.npy", np.frombuffer(b"".join(sha256), dtype=np.uint8).reshape(written, -1))
    return {"rows": written, "tokens": written * shape[1], "counted_tokens": counted}


def _checked(paths: list[Path], shape: tuple[int, int], vocab_size: int) -> Iterator[Row]:
    """Yield the rows of a split's files, checked against the plan's row length and vocabulary."""
    for path in paths:
        rows = _from_npy(path) if path.suffix == ".npy" else _from_parquet(path)
        for i, (tokens, counts) in enumerate(rows):
            if tokens.shape != (shape[1],) or counts.shape != tokens.shape:
                what = (
                    f"tokens of shape {tokens.shape} and labels of shape {counts.shape}, but the plan needs the shape "
                    f"{(shape[1],)}"
                )
                _refuse(path, f"row {i} has {what}")
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                _refuse(path, f"row {i} has token {tokens.max()}, but the model's vocabulary has {vocab_size} tokens")
            yield tokens, counts


def _from_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=["input_ids", "labels"]):
                columns = [batch.column(name).to_pylist() for name in ("input_ids", "labels")]
                for i, (tokens, labels) in enumerate(zip(*columns, strict=True)):
                    yield _row(path, i, np.asarray(tokens, dtype=np.int64), np.asarray(labels, dtype=np.int64))
    except (OSError, KeyError, ValueError, TypeError, arrow.ArrowException) as error:
        _refuse(path, f"the file does not have rows of input_ids and labels: {error!r}")


def _row(path: Path, i: int, tokens: np.ndarray, labels: np.ndarray) -> Row:
    counts = labels != NOT_COUNTED
    if labels.shape == tokens.shape and not np.array_equal(labels[counts], tokens[counts]):
        _refuse(path, f"the labels of row {i} do not match its tokens: they are shifted, or from another row")
    return tokens, counts


def _from_npy(path: Path) -> Iterator[Row]:
    try:
        rows = _unpickled(path)
        for i, row in enumerate(rows):
            if list(row.get("seq_start_id", [0])) != [0]:
                _refuse(
                    path,
                    f"row {i} has an unsupported document mask: seq_start_id {list(row['seq_start_id'])[:4]} …",
                )
            yield np.asarray(row["input_ids"], dtype=np.int64), np.asarray(row["loss_mask"], dtype=np.int64) != 0
    except (OSError, KeyError, ValueError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        _refuse(path, f"the file does not have rows of input_ids and loss_mask: {error!r}")


class _ArrayUnpickler(pickle.Unpickler):
    """Reads arrays, lists, dicts and numbers. Any other class is refused, since unpickling it could run code."""

    _RECONSTRUCT = np.empty(0).__reduce__()[0]
    KNOWN = {
        "_reconstruct": _RECONSTRUCT,
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "scalar": np.int64(0).__reduce__()[0],
        "_frombuffer": np.zeros(1).__reduce_ex__(5)[0],
    }

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "numpy" and name in self.KNOWN:
            return self.KNOWN[name]
        raise pickle.UnpicklingError(f"the pickle refers to {module}.{name}, which could run code")


def _unpickled(path: Path) -> Any:
    """Return the list in an npy of Python objects. Source: numpy.lib.format."""
    with path.open("rb") as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        _, _, dtype = read(file)
        if not dtype.hasobject:
            raise ValueError(f"the dtype is {dtype} instead of object")
        return _ArrayUnpickler(file).load()


def _refuse(path: Path, what: str) -> None:
    raise ConfigError(
        f"{path.name}: {what}",
        where=str(path),
        fix="use MLPerf's GovReport rows, or correct data.train_rows, data.eval_rows, data.seq_length or model",
    )
