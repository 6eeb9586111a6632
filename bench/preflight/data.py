"""Check data files, prepared rows, tokenizers and checkpoints by headers, names and sizes."""

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.contract import atomic_files, chat, data_files, hugging_face, megatron_files
from bench.contract import checkpoint as checkpoints
from bench.contract.atomic_files import read_object
from bench.contract.data import DataSource
from bench.contract.plan import Plan
from bench.contract.plan_paths import expanded
from bench.contract.schema import Config, Data
from bench.errors import BenchError, ConfigError
from bench.fetch import sources
from bench.fetch.commands import model_command as model_command
from bench.fetch.commands import or_download as or_download
from bench.planning import npy_header, to_prepare
from bench.rules.check import CannotTellError, Finding, Subject, broken

MANIFEST = "manifest.json"
HASHED_BYTES = 2**24
"""Larger files are compared by size only: reading a terabyte on a login node takes too long."""
DTYPES = {"tokens": (re.compile(r"[<>|=][iu][1248]"), "whole numbers"), "counts": (re.compile(r"\|[biu]1"), "bool")}
"""The dtypes that ranks can read in NAME_tokens.npy and NAME_counts.npy, and a name for them."""


def prepared_rows(folder: Path, planned: Data) -> Iterator[Finding]:
    """Yield differences between the prepared rows in a folder and those that the plan needs."""
    if not (folder / "train_tokens.npy").exists():
        fix = "set DATADIR to the prepared rows; `python -m jobs.tasks.convert rows` creates them (docs/weights.md)"
        fix += or_download(sources.data_command(planned, folder))
        yield broken(
            "CFG-06",
            f"there are no prepared rows of {planned.name}",
            str(folder / "train_tokens.npy"),
            fix=fix,
        )
        return
    for name, count in (("train", planned.num_train_rows), ("eval", planned.eval_rows)):
        parts = DTYPES | ({"starts": DTYPES["counts"]} if planned.document_mask else {})
        for part, (dtype, kind) in parts.items():
            path, shape = folder / f"{name}_{part}.npy", (count, planned.seq_length)
            fix = f"prepare {planned.name} again, or correct data.{name}_rows and data.seq_length"
            try:
                header = npy_header.read(path)
            except (OSError, ValueError) as error:
                yield broken("CFG-06", f"{path.name} cannot be read: {_reason(error)}", str(path), fix=fix)
                continue
            if header.shape != shape:
                what = f"{path.name} has shape {header.shape}, but the plan needs {shape}"
                yield broken("CFG-06", what, str(path), fix=fix)
            elif not dtype.fullmatch(header.dtype):
                what = f"{path.name} has dtype {header.dtype}, but {part} must be {kind}"
                yield broken("CFG-06", what, str(path), fix=fix)
            elif (size := path.stat().st_size) != header.num_bytes:
                yield broken(
                    "CFG-06",
                    f"{path.name} has {size:,} bytes, but its header requires {header.num_bytes:,} bytes",
                    str(path),
                    fix="copy the file again",
                )


def megatron_files_in(folder: Path, planned: Data) -> Iterator[Finding]:
    """Yield files of Megatron-LM in a folder that are missing, truncated, or have too few tokens for the rows."""
    for name, rows in ((planned.files, 1), (planned.eval_files, planned.eval_rows)):  # training rows may repeat
        try:
            header = megatron_files.read(folder, str(name))
        except ConfigError as error:
            fix = error.fix + or_download(sources.data_command(planned, folder))
            yield broken("CFG-06", error.what, error.where, fix=fix)
            continue
        if header.num_tokens < (needed := rows * planned.seq_length + 1):
            yield broken(
                "CFG-06",
                f"{name}.bin has {header.num_tokens:,} tokens, but the run needs {needed:,} tokens",
                str(folder / f"{name}.bin"),
                fix=megatron_files.FIX,
            )


def checkpoint(folder: Path, config: Config, words: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield an error if a folder contains no checkpoint that the run can load.

    The converted weights of a Hugging Face folder are in a subfolder of it. words: the arguments of the command line,
    for the fix.
    """
    model = config.model
    located = checkpoints.located(folder, config)
    path = located / "metadata.json"
    if checkpoints.is_source(folder) and not path.exists():
        try:
            hugging_face.check(folder, model)
        except hugging_face.MissingWeightsError as error:
            fix = error.fix + or_download(model_command(folder, model))
            yield broken("CFG-06", error.what, error.where, fix=fix)
            return
        except ConfigError as error:
            yield broken("CFG-06", error.what, error.where, fix=error.fix)
            return
        if located == folder:  # this engine reads the folder itself
            return
        first = to_prepare.Conversion(folder, located).fix
        fix = f"run this command first: {to_prepare.command(words)}"
        fix = f"{first}; then {fix}" if first else fix
        yield broken("CFG-06", f"the Hugging Face weights of {model.name} are not converted", str(folder), fix=fix)
        return
    if not path.exists():
        fix = "set MODEL to a folder with config.json and *.safetensors, or to a checkpoint folder with metadata.json"
        fix += or_download(model_command(folder, model))
        yield broken("CFG-06", f"the folder contains no megatron-core checkpoint of {model.name}", str(folder), fix=fix)
        return
    try:
        metadata = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield broken("CFG-06", f"metadata.json cannot be read: {_reason(error)}", str(path))
        return
    if not isinstance(metadata, dict) or "sharded_backend" not in metadata:
        yield broken("CFG-06", "metadata.json does not describe a megatron-core checkpoint", str(path))
    try:
        checkpoints.require(located, config)
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)


def manifest(folder: Path, *, fix: str | None = None) -> Iterator[Finding]:
    """Yield differences between the files of a folder and its manifest.json, [{path, bytes, sha256?}, …].

    fix: what to do about any of them; by default that of files which the user has copied here.
    """
    path = folder / MANIFEST
    if not path.exists():
        return
    try:
        listed = json.loads(path.read_text())
        entries = [(str(entry["path"]), int(entry["bytes"]), entry.get("sha256")) for entry in _entries(listed)]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        fix = fix or f"write {MANIFEST} as a JSON list of objects with path, bytes and sha256"
        yield broken("CFG-06", f"{MANIFEST} cannot be read: {_reason(error)}", str(path), fix=fix)
        return
    wrong = [why for entry in entries if (why := difference(folder, *entry))]
    if wrong:
        more = f", and {len(wrong) - 1} more" if wrong[1:] else ""
        yield broken(
            "CFG-06",
            f"{len(wrong)} of {len(entries)} files differ from {MANIFEST}: {wrong[0]}{more}",
            str(path),
            fix=fix or "copy these files again from their source",
        )


def _entries(manifest: Any) -> Any:
    return manifest["files"] if isinstance(manifest, dict) and "files" in manifest else manifest


def difference(folder: Path, name: str, size: int, digest: Any) -> str:
    """Return how a file differs from its description, or an empty string."""
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if (actual := path.stat().st_size) != size:
        return f"{name} has {actual:,} bytes instead of {size:,}"
    if digest and size <= HASHED_BYTES and atomic_files.sha256(path) != digest:
        return f"{name} has a different SHA-256"
    return ""


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


HEAD_BYTES = 2**20
"""How much of a file is read to find its first record."""


def has_sample(plan: Plan) -> bool:
    """Return whether the run generates the text files from which rows are prepared."""
    data = plan.config.data
    return data is not None and data.source.reads_files and data.sample is not None


def takes_text(plan: Plan) -> bool:
    """Return whether the user provides the text files from which rows are prepared."""
    data = plan.config.data
    return data is not None and data.source.reads_files and data.sample is None


def text_files(plan: Plan, *, root: Path, rows: Path) -> Iterator[Finding | str]:
    """Yield problems with existing rows, or with the text files in `root` (DATADIR) and the space to prepare rows."""
    try:
        tokenizer = _tokenizer(plan)
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)
        tokenizer = None
    if rows.exists():
        yield from prepared_rows(rows, plan.config.training_data)
        yield from manifest(rows)
        yield from _other_tokenizer(rows, tokenizer, plan.config.training_data)
        yield from _other_files(rows)
        yield from _new_files(rows, root, plan)
        yield f"already prepared: {rows}"
        return
    try:
        try:
            files = data_files.find(root, plan.config.training_data)
        except ConfigError as error:
            fix = error.fix + or_download(sources.data_command(plan.config.training_data, root))
            raise ConfigError(error.what, where=error.where, fix=fix) from error
        _check_head(files[0], plan.config.training_data)
        yield f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e9:,.2f} GB"
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)
    except OSError as error:
        yield broken(
            "CFG-06",
            f"this file cannot be read: {error.strerror}",
            str(error.filename),
            fix="give this user read permission",
        )
    yield from _disk_space(plan, root)


def takes_prompts(plan: Plan) -> bool:
    """Return whether the ranks tokenize prompts."""
    return plan.config.task.generation is not None and plan.inputs.checkpoint is not None


def prompts(subject: Subject) -> Iterator[Finding | str]:
    """Yield an error if the tokenizer for the prompts is missing or does not match the model."""
    try:
        path = _tokenizer(subject.plan)
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)
        return
    if path is None:
        raise CannotTellError("MODEL is not set")
    yield str(path)


def _tokenizer(plan: Plan) -> Path | None:
    """Return the path of the tokenizer; None if MODEL is not set, which another check reports.

    Raises:
        ConfigError: it does not exist, does not match the model, or has no end-of-document token or chat template.
    """
    place = expanded(data_files.tokenizer_place(plan.config, plan.inputs.rows))
    if place is None:
        return None
    try:
        data_files.find_tokenizer(Path(place))
    except ConfigError as error:
        fix = error.fix + or_download(model_command(Path(place), plan.config.model))
        raise ConfigError(error.what, where=error.where, fix=fix, rule=error.rule) from error
    path = data_files.checked_tokenizer(plan.config, plan.inputs.rows)
    if path is not None and (data := plan.config.data) is not None:
        _check_chat_template(path, data)
    return path


_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


def _check_chat_template(tokenizer: Path, data: Data) -> None:
    """Raise ConfigError if the source needs a chat template that is missing or that Jinja cannot parse."""
    from jinja2 import Environment, TemplateSyntaxError

    if data.source is not DataSource.chat:
        return
    for text in chat.templates(tokenizer, data.chat_template).values():
        known = _GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", text)
        try:
            Environment(extensions=["jinja2.ext.loopcontrols"]).parse(known)  # noqa: S701 - renders nothing
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"line {error.lineno} of the chat template is not valid: {error.message}",
                where=data.chat_template or str(tokenizer.parent),
                fix="copy the chat template of the model again, or set data.chat_template to a Jinja file",
                rule="CFG-06",
            ) from error


def _other_tokenizer(rows: Path, tokenizer: Path | None, data: Data) -> Iterator[Finding]:
    recorded = read_object(rows / MANIFEST).get("tokenizer")
    if tokenizer is None or not isinstance(recorded, dict):
        return
    try:
        data_files.check_same_tokenizer(rows, recorded, tokenizer, data)
    except ConfigError as error:
        yield broken("CFG-06", error.what, error.where, fix=error.fix)


def _other_files(rows: Path) -> Iterator[Finding]:
    """Yield the first file that has changed since the rows were prepared; deleted files are allowed."""
    source = read_object(rows / MANIFEST).get("source")
    for file in source.get("files", []) if isinstance(source, dict) else []:
        path = Path(file["path"])
        if path.is_file() and (why := difference(path.parent, path.name, file["bytes"], file["sha256"])):
            yield broken(
                "CFG-06",
                f"rows were prepared from a file that has changed since then: {why}",
                f"{rows}, {path}",
                fix="restore this file, or delete the folder of the prepared rows, so that runstop prepares the rows "
                "again",
            )
            return


def _new_files(rows: Path, root: Path, plan: Plan) -> Iterator[Finding]:
    """Yield the first file that did not exist when the rows were prepared and would be read before the last one."""
    source = read_object(rows / MANIFEST).get("source")
    read = [Path(file["path"]) for file in source.get("files", [])] if isinstance(source, dict) else []
    try:
        new = [
            path for path in data_files.find(root, plan.config.training_data) if path not in read and path < max(read)
        ]
    except (ConfigError, OSError, ValueError):  # the files may have been deleted; older manifests list none
        return
    if new:
        yield broken(
            "CFG-06",
            f"the prepared rows do not contain the records of {new[0].name}, because this file was added later",
            f"{rows}, {new[0]}",
            fix="remove the added file, or delete the folder of the prepared rows, so that runstop prepares the rows "
            "again",
        )


def _disk_space(plan: Plan, root: Path) -> Iterator[Finding]:
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        yield broken(
            "CFG-08",
            "this user has no permission to write rows into this folder",
            str(existing),
            fix="set DATADIR to a folder in which this user may write",
        )
        return
    try:
        data_files.check_room(root, plan.config.training_data)
    except BenchError as error:
        yield broken("CFG-08", error.what, error.where, fix=error.fix)


def _check_head(path: Path, data: Data) -> None:
    """Check the first record of a file.

    Raises:
        ConfigError: it does not have the format of this source.
    """
    try:
        if path.suffix != ".parquet":
            if (first := _first(path)) is not None:
                data_files.read_record(first, data)
        elif (names := _parquet_columns(path)) is not None:
            data_files.columns_in_file(names, data)
    except ValueError as error:
        raise ConfigError(
            f"the first record is not valid: {error}", where=str(path), fix=data_files.columns_fix(data)
        ) from error


def _parquet_columns(path: Path) -> list[str] | None:
    """Return the names of the columns; None if pyarrow is not installed, as on many login nodes."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        return None
    try:
        return list(parquet.read_schema(path).names)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(
            f"the parquet file is truncated or damaged: {str(error).splitlines()[0]}",
            where=str(path),
            fix="copy the file again",
        ) from error


def _first(path: Path) -> Any:
    """Return the first record of a file of JSON: lines, an array, or an object with a record for each PMID.

    None if it is longer than HEAD_BYTES.

    Raises:
        ConfigError: it is damaged.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"the gzip file is damaged: {error}", where=str(path), fix="copy the file again") from error
    by_pmid = data_files.BY_PMID.match(head.removeprefix(codecs.BOM_UTF8))
    head_of_record = head.removeprefix(codecs.BOM_UTF8)[by_pmid.end() :] if by_pmid else head
    text = head_of_record.decode("utf-8-sig", errors="replace").lstrip().removeprefix("[").lstrip()
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except ValueError as error:
        if len(head) == HEAD_BYTES:
            return None
        raise ConfigError(
            f"the first record is not JSON: {error}", where=str(path), fix="write one JSON object per line"
        ) from error
