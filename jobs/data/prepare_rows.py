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
from pathlib import Path
from typing import Any

from bench.contract import codec, data_files
from bench.contract.atomic_files import atomic_folder
from bench.contract.checkpoint import MANIFEST
from bench.contract.plan import fingerprint
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.plan_paths import expanded
from bench.errors import BenchError, ConfigError
from jobs.data import samples, tokenization, tokenizer, workers, writing


def prepare(plan: TrainingPlan, *, processes: int | None = None) -> dict[str, Any]:
    """Prepare the plan's rows unless they exist; return their manifest. Only one process at a time may call this.

    Raises:
        ConfigError: files, tokenizer or settings do not match.
        BenchError: the disk is full, or a file cannot be read or written.
    """
    folder, root = _named(plan.data_dir), _named(plan.config.cluster.paths.data)
    try:
        if plan.config.training_data.sample is not None:
            samples.provide(
                Path(data_files.sample_dir(str(folder))), plan.config.training_data, plan.config.model.vocab_size
            )
        if folder.exists():
            return _existing(plan, folder)
        return _prepare(plan, root, folder, processes or len(os.sched_getaffinity(0)))
    except OSError as error:
        raise BenchError(
            f"the rows cannot be read or written: {error.strerror or error}",
            where=str(error.filename or root),
            fix="free disk space or correct the permissions, then run the same command again: finished blocks are kept",
            rule="CFG-08",
        ) from error
    except ModuleNotFoundError as error:
        fix = "pip install 'runstop[data]', or use an image with tokenizers and pyarrow"
        raise ConfigError(f"{error.name} is not installed", where=sys.executable, fix=fix) from error


def _named(path: str | None) -> Path:
    if (full := expanded(path)) is None:
        raise ConfigError(f"{path or 'DATADIR'} is not set", where="cluster.paths.data", fix="export DATADIR=FOLDER")
    return Path(full)


def _tokenizer_file(plan: TrainingPlan) -> Path:
    place = expanded(data_files.tokenizer_place(plan.config, plan.data_dir))
    if place is None:
        fix = "export MODEL=FOLDER, or set data.tokenizer"
        raise ConfigError(
            "MODEL is not set, but the tokenizer is read from this folder", where="cluster.paths.model", fix=fix
        )
    return data_files.find_tokenizer(Path(place))


def _existing(plan: TrainingPlan, folder: Path) -> dict[str, Any]:
    """Return the manifest of existing rows; refuse rows of another tokenizer."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    data_files.check_same_tokenizer(folder, manifest["tokenizer"], _tokenizer_file(plan))
    return manifest


def _prepare(plan: TrainingPlan, root: Path, folder: Path, processes: int) -> dict[str, Any]:
    """Write the rows and return their manifest."""
    config, data = plan.config, plan.config.training_data
    tokenizer_file = _tokenizer_file(plan)
    tokens_by = tokenizer.load(tokenizer_file)
    data_files.check_vocabulary(tokenizer_file, tokens_by.num_ids, config.model.vocab_size)
    sample = Path(data_files.sample_dir(str(folder))) / samples.RECORDS
    sources = data_files.find(root, data) if data.sample is None else [sample / samples.FILES[data.source]]
    data_files.check_room(root, data)
    state = _state(sources)
    described = _described_tokenizer(tokenizer_file, tokens_by)
    identity = fingerprint(tokenization.VERSION, data.source, data.prompt_type, described, state)
    work = root / f"{data.name}-tokens-{identity}"
    work.mkdir(parents=True, exist_ok=True)
    settings = {
        "source": data.source.name,
        "prompt_type": codec.plain(data.prompt_type),
        "tokenizer": str(tokenizer_file),
        "folder": str(work),
    }
    with workers.started(processes, settings) as submit:
        blocks = tokenization.tokenize_files(submit, sources, data)
        with atomic_folder(folder) as part:
            manifest = writing.write(part, work, blocks, data, pad=tokens_by.pad, where=str(data.files or sample))
            manifest |= {"tokenizer": described} | writing.checksums(submit, part, blocks)
            if _state(sources) != state:
                raise ConfigError(
                    "the input files changed while they were read",
                    where=str(sources[0]),
                    fix="run the same command again",
                )
            (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(work)
    return manifest


def _state(sources: list[Path]) -> list[Any]:
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in sources]


def _described_tokenizer(path: Path, by: tokenizer.Tokenizer) -> dict[str, Any]:
    tokens = {"bos": by.bos, "eos": by.eos, "pad": by.pad, "num_ids": by.num_ids}
    return {"file": str(path), "sha256": writing.described(path)["sha256"], **tokens}


def described(manifest: dict[str, Any]) -> list[str]:
    """Return lines that summarise the rows."""
    records = manifest["records"]
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
        f"{records['left_out_long_prompts']:,} with a prompt as long as a row",
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
