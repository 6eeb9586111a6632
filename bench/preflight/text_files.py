"""Whether the files that rows are to be made from can be read, fit the model, and there is room for the rows."""

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.contract import data_files
from bench.contract.data import DataSource
from bench.contract.json_files import read_object
from bench.contract.plan import GenerationPlan, Plan
from bench.contract.plan_paths import expanded
from bench.errors import BenchError, ConfigError
from bench.preflight import data
from bench.rules.check import CannotTellError, Finding, Subject, broken

HEAD_BYTES = 2**20
"""So much of a file is read to see its first record."""


def takes_text(plan: Plan) -> bool:
    """Return whether the user brings files that rows are made from."""
    return plan.config.data.source.reads_files and plan.config.data.sample is None


def found(plan: Plan, *, root: Path, rows: Path) -> Iterator[Finding | str]:
    """Yield what stands in the way of the rows: they are there already, or can be made in `root`, which is DATADIR."""
    try:
        tokenizer = _tokenizer(plan)
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)
        tokenizer = None
    if rows.exists():
        yield from data.rows(rows, plan.config.data)
        yield from data.manifest(rows)
        yield from _other_tokenizer(rows, tokenizer)
        yield from _other_files(rows)
        yield from _new_files(rows, root, plan)
        yield f"made before: {rows}"
        return
    try:
        files = data_files.find(root, plan.config.data)
        _check_head(files[0], plan.config.data.source)
        yield f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e9:,.2f} GB"
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)
    except OSError as error:
        yield broken("CFG-06", f"cannot be read: {error.strerror}", str(error.filename), fix="see that you may read it")
    yield from _room(plan, root)


def takes_prompts(plan: Plan) -> bool:
    """Return whether the ranks tokenise prompts."""
    return isinstance(plan, GenerationPlan) and plan.base_dir is not None


def prompts(subject: Subject) -> Iterator[Finding | str]:
    """Yield whether there is no tokenizer for the prompts, or that of another model."""
    try:
        path = _tokenizer(subject.plan)
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)
        return
    if path is None:
        raise CannotTellError("MODEL is not set")
    yield str(path)


def _tokenizer(plan: Plan) -> Path | None:
    """Return the tokenizer.json; None where MODEL is not set, which another check says.

    Raises:
        ConfigError: there is none, it does not fit the model, or nothing says how a document ends.
    """
    place = expanded(data_files.tokenizer_place(plan.config, plan.data_dir))
    if place is None:
        return None
    path = data_files.find_tokenizer(Path(place))
    data_files.check_vocabulary(path, data_files.num_ids(path), plan.config.model.vocab_size)
    if not read_object(path.with_name(data_files.TOKENIZER_CONFIG)).get("eos_token"):
        raise data_files.unnamed_token(path, "eos_token")
    return path


def _other_tokenizer(rows: Path, tokenizer: Path | None) -> Iterator[Finding]:
    made_with = read_object(rows / data.MANIFEST).get("tokenizer")
    if tokenizer is None or not isinstance(made_with, dict):
        return
    try:
        data_files.check_same_tokenizer(rows, made_with, tokenizer)
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)


def _other_files(rows: Path) -> Iterator[Finding]:
    """Yield the first file that is not what the rows were made from; files may be gone once there are rows."""
    source = read_object(rows / data.MANIFEST).get("source")
    for file in source.get("files", []) if isinstance(source, dict) else []:
        path = Path(file["path"])
        if path.is_file() and (why := data.difference(path.parent, path.name, file["bytes"], file["sha256"])):
            fix = "remove the folder of the rows: they are then made anew; or bring back the file"
            yield broken("CFG-06", f"these rows were made from another file: {why}", f"{rows}, {path}", fix=fix)
            return


def _new_files(rows: Path, root: Path, plan: Plan) -> Iterator[Finding]:
    """Yield the first file that would have been read for the rows, and was not there; files are read in their order."""
    source = read_object(rows / data.MANIFEST).get("source")
    read = [Path(file["path"]) for file in source.get("files", [])] if isinstance(source, dict) else []
    try:
        new = [path for path in data_files.find(root, plan.config.data) if path not in read and path < max(read)]
    except (ConfigError, OSError, ValueError):  # the files may be gone once there are rows; older manifests list none
        return
    if new:
        fix = "remove the folder of the rows: they are then made anew; or take the file away"
        yield broken("CFG-06", f"these rows were made without {new[0].name}", f"{rows}, {new[0]}", fix=fix)


def _room(plan: Plan, root: Path) -> Iterator[Finding]:
    there = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        fix = "let DATADIR be a folder that the job may write"
        yield broken("CFG-08", "rows cannot be written", str(there), fix=fix)
        return
    try:
        data_files.check_room(root, plan.config.data)
    except BenchError as error:
        yield broken("CFG-08", error.what, error.where, fix=error.fix)


def _check_head(path: Path, source: DataSource) -> None:
    """Look at the first record of a file.

    Raises:
        ConfigError: it is not one of this source.
    """
    columns, fix = data_files.FORMATS[source].columns, data_files.columns_fix(source)
    if path.suffix == ".parquet":
        names = _parquet_columns(path)
        missing = [] if names is None else [name for name in columns if name not in names]
        wrong = f"no column {', '.join(missing)}; there are {', '.join(names or [])}" if missing else None
    else:
        first = _first(path)
        wrong = None if first is None else data_files.check_record(first, columns)
    if wrong:
        raise ConfigError(f"the first record: {wrong}", where=str(path), fix=fix)


def _parquet_columns(path: Path) -> list[str] | None:
    """Return the names of the columns; None where pyarrow is not installed, as it need not be on a login node."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        return None
    try:
        return list(parquet.read_schema(path).names)
    except (OSError, pyarrow.ArrowException) as error:
        what = f"the parquet is cut short or damaged: {str(error).splitlines()[0]}"
        raise ConfigError(what, where=str(path), fix="copy it again") from error


def _first(path: Path) -> Any:
    """Return the first record of JSON lines or of an array; None where it is longer than what is read of it.

    Raises:
        ConfigError: it is damaged.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"the gzip is damaged: {error}", where=str(path), fix="copy it again") from error
    text = head.decode("utf-8-sig", errors="replace").lstrip().removeprefix("[").lstrip()
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError as error:
        if len(head) == HEAD_BYTES:
            return None
        fix = "write one JSON object on each line"
        raise ConfigError(f"the first record is not JSON: {error}", where=str(path), fix=fix) from error
