"""Prepare rows from a source's files: tokenise on all cores, pack or pad into rows, and write a manifest.

Tokenised blocks are kept next to the rows until the rows are complete, so that an interrupted run, or one that needs
more files, resumes from them. The folder of the rows gets its final name when it is complete.
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.contract import codec, data_files
from bench.contract.atomic_files import atomic_folder
from bench.contract.checkpoint import MANIFEST
from bench.contract.data import Data
from bench.contract.plan import fingerprint
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.plan_paths import expanded
from bench.contract.schema import Config
from bench.errors import BenchError, ConfigError
from jobs.data import samples, tokenization, tokenizer, workers, writing


def prepare(plan: TrainingPlan, *, processes: int | None = None) -> dict[str, Any]:
    """Prepare the plan's rows unless they exist; return their manifest. Only one process at a time may call this.

    Raises:
        ConfigError: files, tokenizer or settings do not match.
        BenchError: the disk is full, or a file cannot be read or written.
    """
    return _at(named(plan.data_dir), plan.config, processes)


def of_config(config: Config, *, processes: int | None = None) -> tuple[Path, dict[str, Any]]:
    """Prepare the rows of a config before it is planned; return their folder and manifest; raises as `prepare`.

    If data.train_rows is null, all rows of the files are prepared.
    """
    data, root = config.training_data, named(config.cluster.paths.data)
    if data.train_rows is None:
        return _counted(config, root, processes)
    folder = Path(data_files.rows_dir(str(root), data, config.model.vocab_size))
    return folder, _at(folder, config, processes)


def _at(folder: Path, config: Config, processes: int | None) -> dict[str, Any]:
    with _explained(folder.parent):
        if config.training_data.sample is not None:
            place = Path(data_files.sample_dir(str(folder)))
            samples.provide(place, config.training_data, config.model.vocab_size)
        if folder.exists():
            return _existing(config, folder)
        return _prepare(config, folder, processes)


def _counted(config: Config, root: Path, processes: int | None) -> tuple[Path, dict[str, Any]]:
    """Prepare all rows; their folder gets the name that it has in a plan with the number of rows."""
    data, vocab_size = config.training_data, config.model.vocab_size
    with _explained(root):
        if (existing := data_files.counted_rows(root, data, vocab_size)) is not None:
            return existing[0], _existing(config, existing[0], with_files=True)
        uncounted = Path(data_files.rows_dir(str(root), data, vocab_size))
        if uncounted.exists():  # it is complete, but its process was stopped before it was renamed
            manifest = _existing(config, uncounted, with_files=True)
        else:
            manifest = _prepare(config, uncounted, processes)
        counted = replace(data, train_rows=manifest["splits"]["train"]["rows"])
        folder = Path(data_files.rows_dir(str(root), counted, vocab_size))
        if folder.exists():
            raise ConfigError(
                f"the folder has rows that were prepared with data.train_rows={counted.train_rows}, but this command "
                "does not set data.train_rows",
                where=str(folder),
                fix=f"add data.train_rows={counted.train_rows} to this command, or delete the folder and run "
                "the same command again",
            )
        uncounted.rename(folder)
        return folder, manifest


@contextmanager
def _explained(root: Path) -> Iterator[None]:
    """Add a fix to errors of the operating system and to missing packages."""
    try:
        yield
    except OSError as error:
        raise BenchError(
            f"the rows cannot be read or written: {error.strerror or error}",
            where=str(error.filename or root),
            fix="free disk space or correct the permissions, then run the same command again: finished blocks are kept",
            rule="CFG-08",
        ) from error
    except ModuleNotFoundError as error:
        fix = "pip install 'runstop[data]', or use an image with tokenizers, jinja2 and pyarrow"
        raise ConfigError(f"the Python package {error.name} is not installed", where=sys.executable, fix=fix) from error


def named(path: str | None) -> Path:
    """Return a path with its variables expanded; ConfigError if one of them is not set."""
    if (full := expanded(path)) is None:
        raise ConfigError(f"{path or 'DATADIR'} is not set", where="cluster.paths.data", fix="export DATADIR=FOLDER")
    return Path(full)


def _tokenizer_file(config: Config, folder: Path) -> Path:
    place = expanded(data_files.tokenizer_place(config, str(folder)))
    if place is None:
        fix = "export MODEL=FOLDER, or set data.tokenizer"
        raise ConfigError(
            "the environment variable MODEL is not set, so runstop cannot find the tokenizer",
            where="cluster.paths.model",
            fix=fix,
        )
    return data_files.find_tokenizer(Path(place))


def _existing(config: Config, folder: Path, *, with_files: bool = False) -> dict[str, Any]:
    """Return the manifest of existing rows; refuse rows of another tokenizer or, `with_files`, of other files."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    used, tokenizer_file = manifest["tokenizer"], _tokenizer_file(config, folder)
    data_files.check_same_tokenizer(folder, used, tokenizer_file, config.training_data)
    if with_files and _differ(_sources(config, folder), manifest["source"]["files"]):
        raise ConfigError(
            "the input files have changed since these rows were prepared",
            where=str(folder),
            fix="delete this folder, and run the same command again",
            rule="CFG-06",
        )
    return manifest


def _differ(sources: list[Path], listed: list[dict[str, Any]]) -> bool:
    """Return whether files are not those in a manifest, by path, size and checksum."""
    now = [(str(path), path.stat().st_size) for path in sources]
    if now != [(one["path"], one["bytes"]) for one in listed]:
        return True
    return any(writing.described(Path(one["path"]))["sha256"] != one["sha256"] for one in listed)


def _sources(config: Config, folder: Path) -> list[Path]:
    data, root = config.training_data, named(config.cluster.paths.data)
    if data.sample is None:
        return data_files.find(root, data)
    return [Path(data_files.sample_dir(str(folder))) / samples.RECORDS / samples.FILES[data.source]]


def _prepare(config: Config, folder: Path, processes: int | None) -> dict[str, Any]:
    """Write the rows and return their manifest."""
    data, root, vocab_size = config.training_data, folder.parent, config.model.vocab_size
    tokenizer_file = _tokenizer_file(config, folder)
    tokens_by = tokenizer.load(tokenizer_file)
    data_files.check_vocabulary(tokenizer_file, tokens_by.num_ids, vocab_size)
    tokenization.encoder_of(data, tokenizer_file)  # a chat template with an error is refused before processes start
    sources = _sources(config, folder)
    data_files.check_room(root, data)
    state = _state(sources)
    described = _described_tokenizer(tokenizer_file, tokens_by, data)
    kind = (data.source, data.prompt_type, data.columns)
    identity = fingerprint(tokenization.VERSION, *kind, described, state)
    work = root / f"{data.name}-tokens-{identity}"
    work.mkdir(parents=True, exist_ok=True)
    settings = {"data": codec.plain(data), "tokenizer": str(tokenizer_file), "folder": str(work)}
    with workers.started(processes or len(os.sched_getaffinity(0)), settings) as submit:
        blocks = tokenization.tokenize_files(submit, sources, data)
        with atomic_folder(folder) as part:
            manifest = writing.write(part, work, blocks, data, pad=tokens_by.pad, where=str(data.files or sources[0]))
            manifest |= {"tokenizer": described} | writing.checksums(submit, part, blocks)
            if data.train_rows is None:
                manifest |= {data_files.COUNTED: data_files.config_of_count(data, vocab_size)}
            if _state(sources) != state:
                raise ConfigError(
                    "the input files changed while runstop read these files",
                    where=str(sources[0]),
                    fix="run the same command again",
                )
            (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(work)
    return manifest


def _state(sources: list[Path]) -> list[Any]:
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in sources]


def _described_tokenizer(path: Path, by: tokenizer.Tokenizer, data: Data) -> dict[str, Any]:
    tokens = {"bos": by.bos, "eos": by.eos, "pad": by.pad, "num_ids": by.num_ids}
    template = data_files.template_sha256(data, path)
    chat = {} if template is None else {"chat_template": template}
    return {"file": str(path), "sha256": writing.described(path)["sha256"], **tokens, **chat}


def described(manifest: dict[str, Any]) -> list[str]:
    """Return lines that summarise the rows."""
    records = manifest["records"]
    special = records.get("left_out_special_tokens", 0)
    lines = [
        f"{name}: {split['rows']:,} of {split['rows_there']:,} rows in the files, "
        f"{split['tokens']:,} tokens, {_share(split['real_tokens'], split['tokens'])} real, "
        f"{_share(split['counted_tokens'], split['tokens'])} in the loss"
        for name, split in manifest["splits"].items()
    ]
    of_documents = [
        f"{records['documents']:,} records tokenised, "
        f"{records['cut']:,} ({_share(records['cut'], records['documents'])}) truncated to a row",
        f"skipped: {records['left_out_empty']:,} without text or answer, "
        f"{records['left_out_long_prompts']:,} with a prompt as long as a row"
        + (f", {special:,} with the text of a special token" if special else ""),
        f"tokens per record (minimum, deciles, maximum): {' '.join(map(str, records['lengths_by_decile']))}",
    ]
    return [*lines, *of_documents]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


LOCK = ".prepare.lock"


@contextmanager
def locked_folder(root: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that one process at a time prepares rows in it."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
