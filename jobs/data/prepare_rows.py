"""Make rows of a source's files: tokenise them on all cores, lay them out as rows, and say what was made of what.

Tokenised blocks are kept beside the rows until those are complete, so that what was killed, or asked for rows that are
not there, goes on where it was. The folder of the rows appears when it is complete.
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
from bench.contract.atomic_files import appearing
from bench.contract.checkpoint import MANIFEST
from bench.contract.plan import fingerprint
from bench.contract.plan_kinds import TrainingPlan
from bench.contract.plan_paths import expanded
from bench.errors import BenchError, ConfigError
from jobs.data import samples, tokenization, tokenizer, workers, writing


def make(plan: TrainingPlan, *, processes: int | None = None) -> dict[str, Any]:
    """Return the manifest of the plan's rows, which are made unless they are there. One process at a time may call it.

    Raises:
        ConfigError: files, tokenizer or settings do not fit each other.
        BenchError: there is no room, or something cannot be read or written.
    """
    folder, root = _named(plan.data_dir), _named(plan.config.cluster.paths.data)
    try:
        if plan.config.training_data.sample is not None:
            samples.provide(
                Path(data_files.sample_dir(str(folder))), plan.config.training_data, plan.config.model.vocab_size
            )
        if folder.exists():
            return _found(plan, folder)
        return _made(plan, root, folder, processes or len(os.sched_getaffinity(0)))
    except OSError as error:
        raise BenchError(
            f"cannot read or write: {error.strerror or error}",
            where=str(error.filename or root),
            fix="make room, or see that this user may read and write there; what is tokenised is kept: run it again",
            rule="CFG-08",
        ) from error
    except ModuleNotFoundError as error:
        fix = "pip install 'runstop[data]', or use an image with tokenizers and pyarrow"
        raise ConfigError(f"{error.name} is not installed", where=sys.executable, fix=fix) from error


def _named(path: str | None) -> Path:
    if (full := expanded(path)) is None:
        raise ConfigError(f"{path or 'DATADIR'} is not set", where="cluster.paths.data", fix="export DATADIR=…")
    return Path(full)


def _tokenizer_file(plan: TrainingPlan) -> Path:
    place = expanded(data_files.tokenizer_place(plan.config, plan.data_dir))
    if place is None:
        fix = "export MODEL=…, or set data.tokenizer"
        raise ConfigError("MODEL is not set, where the tokenizer lies", where="cluster.paths.model", fix=fix)
    return data_files.find_tokenizer(Path(place))


def _found(plan: TrainingPlan, folder: Path) -> dict[str, Any]:
    """Return the manifest of rows that are there; refuse those that another tokenizer made."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    data_files.check_same_tokenizer(folder, manifest["tokenizer"], _tokenizer_file(plan))
    return manifest


def _made(plan: TrainingPlan, root: Path, folder: Path, processes: int) -> dict[str, Any]:
    """Return the manifest of rows made now."""
    config, data = plan.config, plan.config.training_data
    by_file = _tokenizer_file(plan)
    by = tokenizer.load(by_file)
    data_files.check_vocabulary(by_file, by.num_ids, config.model.vocab_size)
    sample = Path(data_files.sample_dir(str(folder))) / samples.RECORDS
    sources = data_files.find(root, data) if data.sample is None else [sample / samples.FILES[data.source]]
    data_files.check_room(root, data)
    state = _state(sources)
    described = _described_tokenizer(by_file, by)
    identity = fingerprint(tokenization.VERSION, data.source, data.prompt_type, described, state)
    work = root / f"{data.name}-tokens-{identity}"
    work.mkdir(parents=True, exist_ok=True)
    settings = {
        "source": data.source.name,
        "prompt_type": codec.plain(data.prompt_type),
        "tokenizer": str(by_file),
        "folder": str(work),
    }
    with workers.started(processes, settings) as ask:
        made = tokenization.tokenised(ask, sources, data)
        with appearing(folder) as part:
            manifest = writing.write(part, work, made, data, pad=by.pad, where=str(data.files or sample))
            manifest |= {"tokenizer": described} | writing.checksums(ask, part, made)
            if _state(sources) != state:
                raise ConfigError("files changed while they were read", where=str(sources[0]), fix="run it again")
            (part / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    shutil.rmtree(work)
    return manifest


def _state(sources: list[Path]) -> list[Any]:
    return [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in sources]


def _described_tokenizer(path: Path, by: tokenizer.Tokenizer) -> dict[str, Any]:
    tokens = {"bos": by.bos, "eos": by.eos, "pad": by.pad, "num_ids": by.num_ids}
    return {"file": str(path), "sha256": writing.described(path)["sha256"], **tokens}


def described(manifest: dict[str, Any]) -> list[str]:
    """Return lines that say what the rows are."""
    records = manifest["records"]
    lines = [
        f"{name}: {split['rows']:,} rows of {split['rows_there']:,} that the files hold, "
        f"{split['tokens']:,} tokens, {_share(split['real_tokens'], split['tokens'])} real, "
        f"{_share(split['counted_tokens'], split['tokens'])} count"
        for name, split in manifest["splits"].items()
    ]
    of_documents = [
        f"{records['documents']:,} records tokenised, "
        f"{records['cut']:,} ({_share(records['cut'], records['documents'])}) longer than a row and cut",
        f"left out: {records['left_out_empty']:,} without text or answer, "
        f"{records['left_out_long_prompts']:,} whose prompt fills the row",
        f"tokens of a record, least, deciles and most: {' '.join(map(str, records['lengths_by_decile']))}",
    ]
    return [*lines, *of_documents]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


LOCK = ".prepare.lock"


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Wait until no other process prepares anything in this folder, and keep others waiting meanwhile."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
