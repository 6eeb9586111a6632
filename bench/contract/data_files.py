"""The files that rows are made from: what a source's files are called and hold, and where a tokenizer lies.

Standard library only: ranks use it.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract import atomic_files
from bench.contract.data import Data, DataSource
from bench.contract.schema import Config
from bench.errors import BenchError, ConfigError

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTES_PER_TOKEN = 9
"""While rows are made: 4 for a tokenised block, and 4 + 1 for a row and its mask."""


@dataclass(frozen=True, slots=True)
class Format:
    """What a source's files are called, and what must stand in each record, as text."""

    suffixes: tuple[str, ...]
    columns: tuple[str, ...]


FORMATS = {
    DataSource.fineweb_edu: Format((".parquet",), ("text",)),
    DataSource.c4: Format((".jsonl", ".jsonl.gz", ".json", ".json.gz"), ("text",)),
    DataSource.dolly: Format((".jsonl",), ("instruction", "context", "response")),
    DataSource.pubmedqa: Format((".json", ".jsonl"), ("question", "context", "answer")),
}
"""Sources: the data set cards of HuggingFaceFW/fineweb-edu, allenai/c4 and databricks/databricks-dolly-15k on Hugging
Face; for PubMedQA, Metrum AI's report with Dell on fine-tuning over RoCE (2024), which uses pqa-artificial so."""


def sample_dir(data_dir: str) -> str:
    """Return the folder of a sample's files and tokenizer, beside the rows."""
    return f"{data_dir}.sample"


def find(root: Path, data: Data) -> list[Path]:
    """Return the source's files in the order of their paths.

    Raises:
        ConfigError: there are none, or one of them is empty.
    """
    pattern, suffixes = str(data.files), FORMATS[data.source].suffixes
    place = root / pattern
    if place.is_dir():
        found = sorted(path for path in place.rglob("*") if path.name.endswith(suffixes) and path.is_file())
    elif place.is_file():
        found = [place]
    else:
        top = Path(place.anchor)
        found = sorted(path for path in top.glob(str(place.relative_to(top))) if path.is_file())
    if not found:
        raise ConfigError(
            f"no files of {data.name}",
            where=f"data.files={pattern}: {place}",
            fix=f"set data.files to a file, a folder or a glob of {' or '.join(suffixes)}, below DATADIR or from the "
            "root",
            rule="CFG-06",
        )
    for path in found:
        if path.stat().st_size == 0:
            raise ConfigError("this file is empty", where=str(path), fix="copy it again", rule="CFG-06")
        if not path.name.endswith(suffixes):
            what, fix = f"{data.source.name} is read from {' or '.join(suffixes)}", "name other files in data.files"
            raise ConfigError(what, where=str(path), fix=fix, rule="CFG-06")
    return found


def outside(data: Data) -> list[str]:
    """Return what the rows are made from outside of DATADIR and MODEL, for the mounts of a container."""
    if not data.source.reads_files or data.sample is not None:
        return []
    found = []
    if data.files is not None and data.files.startswith("/"):
        before = data.files.split("*")[0].split("?")[0].split("[")[0]
        found.append(data.files if before == data.files else before.rpartition("/")[0])
    if data.tokenizer is not None:
        found.append(data.tokenizer.rpartition("/")[0] if data.tokenizer.endswith(".json") else data.tokenizer)
    return found


def tokenizer_place(config: Config, data_dir: str | None) -> str | None:
    """Return the file or folder that the tokenizer is looked for in, as the plan has it ($MODEL may stand in it)."""
    data = config.data
    if data is not None and data.sample is not None:
        return None if data_dir is None else sample_dir(data_dir)
    return (data.tokenizer if data is not None else None) or config.cluster.paths.model


def find_tokenizer(place: Path) -> Path:
    """Return the tokenizer.json in a folder, in the Hugging Face folder around a converted checkpoint, or the file.

    Raises:
        ConfigError: there is none.
    """
    for path in (place, place / TOKENIZER, place.parent / TOKENIZER):
        if path.is_file() and path.suffix == ".json":
            return path
    raise ConfigError(
        f"no {TOKENIZER}",
        where=str(place),
        fix=f"point MODEL at a folder with the model's {TOKENIZER} and {TOKENIZER_CONFIG}, or data.tokenizer at the "
        "first; a tokenizer.model alone is not read: transformers' save_pretrained converts it",
        rule="CFG-06",
    )


def num_ids(tokenizer: Path) -> int:
    """Return one more than the largest token of a tokenizer.json. Source: the format of Hugging Face's tokenizers.

    Raises:
        ConfigError: it is not such a file.
    """
    try:
        content = json.loads(tokenizer.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        largest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
        added = [token["id"] for token in content.get("added_tokens") or []]
        return int(max([largest, *added])) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise bad_tokenizer(tokenizer, error) from error


def bad_tokenizer(path: Path, error: object) -> ConfigError:
    """Return the error of a file that is no tokenizer."""
    return ConfigError(
        f"not a tokenizer of Hugging Face's tokenizers: {error}",
        where=str(path),
        fix="copy tokenizer.json from the model's folder again",
        rule="CFG-06",
    )


def unnamed_token(path: Path, name: str) -> ConfigError:
    """Return the error of a tokenizer that does not say which token is, for example, its eos_token."""
    return ConfigError(
        f"the tokenizer does not say which token is its {name}",
        where=str(path.with_name(TOKENIZER_CONFIG)),
        fix=f"copy the model's {TOKENIZER_CONFIG} beside {path.name}, with {name} in it",
        rule="CFG-06",
    )


def check_vocabulary(tokenizer: Path, ids: int, vocab_size: int) -> None:
    """Raise ConfigError when a tokenizer has tokens that the model has no embedding for."""
    if ids > vocab_size:
        raise ConfigError(
            f"the tokenizer's tokens go up to {ids - 1:,}, and the model has {vocab_size:,} of them",
            where=str(tokenizer),
            fix="choose the model= that this tokenizer belongs to, or set data.tokenizer",
            rule="CFG-06",
        )


def check_same_tokenizer(rows: Path, made_with: dict[str, Any], tokenizer: Path) -> None:
    """Raise ConfigError when rows were made with another tokenizer, which their manifest describes."""
    if atomic_files.sha256(tokenizer) != made_with.get("sha256"):
        raise ConfigError(
            f"these rows were made with another tokenizer, {made_with.get('file')}",
            where=f"{rows}, {tokenizer}",
            fix="set data.tokenizer or MODEL to that one, or remove the folder: the rows are then made anew",
            rule="CFG-06",
        )


def check_room(root: Path, data: Data) -> None:
    """Raise BenchError when the disk of a folder, which may not exist yet, has no room for the rows."""
    there = next(path for path in (root, *root.absolute().parents) if path.exists())
    needed, free = room_needed(data), shutil.disk_usage(there).free
    if free < needed:
        raise BenchError(
            f"the rows need about {needed / 1e9:,.2f} GB while they are made, and {free / 1e9:,.2f} are free",
            where=str(there),
            fix="make room, or set fewer data.train_rows",
            rule="CFG-08",
        )


def check_record(record: Any, columns: tuple[str, ...]) -> str | None:
    """Return what is wrong with a record; None where every column holds text."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__} stands where a record should"
    for name in columns:
        if name not in record:
            return f"no column {name}; there are {', '.join(map(str, record)) or 'none'}"
        if not isinstance(record[name], str):
            return f"{name} holds {type(record[name]).__name__} instead of text"
    return None


def columns_fix(source: DataSource) -> str:
    """Return what to do about records of another form."""
    columns = ", ".join(FORMATS[source].columns)
    return f"{source.name} needs {columns} in each record, each a text: convert the file, or set data.source"


def room_needed(data: Data) -> int:
    """Return the bytes that the rows and their tokenised blocks take while they are made, about."""
    return (data.train_rows + data.eval_rows) * data.seq_length * BYTES_PER_TOKEN
