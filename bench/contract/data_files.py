"""The files from which rows are prepared: their formats, and the location of the tokenizer.

Standard library only: ranks import it.
"""

import glob
import json
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.contract import atomic_files, chat, sentencepiece_model
from bench.contract.checkpoint import MANIFEST
from bench.contract.data import Data, DataSource
from bench.contract.plan import fingerprint
from bench.contract.plan_paths import expanded
from bench.contract.schema import Config
from bench.errors import BenchError, ConfigError

TOKENIZER, TOKENIZER_CONFIG, SENTENCEPIECE = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
BYTES_PER_TOKEN = 9
"""Disk space during preparation: 4 for a tokenised block, and 4 + 1 for a row and its mask; 1 more for the document
boundaries with data.document_mask."""


@dataclass(frozen=True, slots=True)
class Format:
    """The file suffixes of a source, and the text fields that each record must have, unless the config names them."""

    suffixes: tuple[str, ...]
    columns: tuple[str, ...]


JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
FORMATS = {
    DataSource.fineweb_edu: Format((".parquet",), ("text",)),
    DataSource.c4: Format(JSON_LINES, ("text",)),
    DataSource.dolly: Format((".jsonl",), ("instruction", "context", "response")),
    DataSource.pubmedqa: Format((".json", ".jsonl"), ("question", "context", "answer")),
    DataSource.text: Format((*JSON_LINES, ".parquet"), ()),
    DataSource.chat: Format((*JSON_LINES, ".parquet"), ()),
}
"""Sources: the data set cards of HuggingFaceFW/fineweb-edu, allenai/c4 and databricks/databricks-dolly-15k on Hugging
Face; for PubMedQA, Metrum AI's report with Dell on fine-tuning over RoCE (2024), which uses pqa-artificial."""
PUBMEDQA_KEYS = {"QUESTION": "question", "CONTEXTS": "context", "LONG_ANSWER": "answer"}
"""The fields of PubMedQA's own files (ori_pqaa.json, ori_pqal.json), and our columns. CONTEXTS is a list of texts.
Source: the README of github.com/pubmedqa/pubmedqa."""
BY_PMID = re.compile(rb'\s*\{\s*"\d+"\s*:\s*(?=\{)')
"""The start of a file that is one object with a record for each PMID, as PubMedQA's own are."""


def rows_dir(root: str, data: Data, vocab_size: int) -> str:
    """Return the folder of prepared rows: one per data config and vocabulary size, so that rows never mix."""
    return f"{root}/{data.name}-{fingerprint(data, vocab_size)}"


COUNTED = "counted_for"
"""Key in the manifest of rows whose number was counted: the config for which they were counted, as a fingerprint."""


def config_of_count(data: Data, vocab_size: int) -> str:
    """Return the fingerprint of a data config without its number of training rows."""
    return fingerprint(replace(data, train_rows=None), vocab_size)


def counted_rows(root: Path, data: Data, vocab_size: int) -> tuple[Path, int] | None:
    """Return the newest folder of rows that were counted for this config, and its number of training rows."""
    wanted, counted = config_of_count(data, vocab_size), list[tuple[float, Path, int]]()
    for path in root.glob(f"{glob.escape(data.name)}-*/{MANIFEST}"):
        manifest = atomic_files.read_object(path)
        try:
            if manifest.get(COUNTED) == wanted:
                counted.append((path.stat().st_mtime, path.parent, int(manifest["splits"]["train"]["rows"])))
        except (OSError, ValueError, TypeError, KeyError):  # removed by another process, or damaged
            continue
    return max(counted)[1:] if counted else None


def sample_dir(data_dir: str) -> str:
    """Return the folder of a sample's files and tokenizer, next to the rows."""
    return f"{data_dir}.sample"


def find(root: Path, data: Data) -> list[Path]:
    """Return the source's files in the order of their paths.

    Raises:
        ConfigError: there are none, or one is empty.
    """
    pattern, suffixes = str(data.files), FORMATS[data.source].suffixes
    place = root / pattern
    if place.is_dir():
        files = sorted(path for path in place.rglob("*") if path.name.endswith(suffixes) and path.is_file())
    elif place.is_file():
        files = [place]
    else:
        top = Path(place.anchor)
        files = sorted(path for path in top.glob(str(place.relative_to(top))) if path.is_file())
    if not files:
        raise ConfigError(
            f"no file of {data.name} matches data.files={pattern}",
            where=str(place),
            fix=f"set data.files to a file, a folder or a glob of {' or '.join(suffixes)} files; write the path "
            "relative to DATADIR, or absolute",
            rule="CFG-06",
        )
    for path in files:
        if path.stat().st_size == 0:
            raise ConfigError("the file is empty", where=str(path), fix="copy the file again", rule="CFG-06")
        if not path.name.endswith(suffixes):
            raise ConfigError(
                f"data.source={data.source.name} reads only files whose name ends in {' or '.join(suffixes)}",
                where=str(path),
                fix=f"set data.files to files that end in {' or '.join(suffixes)}",
                rule="CFG-06",
            )
    return files


def outside(data: Data) -> list[str]:
    """Return the input paths outside of DATADIR and MODEL, which a container must mount."""
    if not data.source.reads_files or data.sample is not None:
        return []
    paths = []
    if data.files is not None and data.files.startswith("/"):
        before = data.files.split("*")[0].split("?")[0].split("[")[0]
        paths.append(data.files if before == data.files else before.rpartition("/")[0])
    if data.tokenizer is not None:
        is_file = data.tokenizer.endswith((".json", ".model"))
        paths.append(data.tokenizer.rpartition("/")[0] if is_file else data.tokenizer)
    if data.chat_template is not None:
        paths.append(data.chat_template)
    return paths


def tokenizer_place(config: Config, data_dir: str | None) -> str | None:
    """Return the file or folder of the tokenizer, as in the plan (it may contain $MODEL)."""
    data = config.data
    if data is not None and data.sample is not None:
        return None if data_dir is None else sample_dir(data_dir)
    return (data.tokenizer if data is not None else None) or config.cluster.paths.model


def find_tokenizer(place: Path) -> Path:
    """Return the tokenizer in a folder, in the Hugging Face folder around a converted checkpoint, or the file itself.

    It is a tokenizer.json or, without one, a tokenizer.model of SentencePiece.

    Raises:
        ConfigError: no tokenizer was found.
    """
    for path in (place, *(folder / name for folder in (place, place.parent) for name in (TOKENIZER, SENTENCEPIECE))):
        if path.is_file() and path.suffix in (".json", ".model"):
            return path
    raise ConfigError(
        f"there is no {TOKENIZER} and no {SENTENCEPIECE} at this path",
        where=str(place),
        fix=f"set MODEL to a folder with {TOKENIZER} (or {SENTENCEPIECE}) and {TOKENIZER_CONFIG}, or set "
        f"data.tokenizer to a {TOKENIZER} or {SENTENCEPIECE}",
        rule="CFG-06",
    )


def checked_tokenizer(config: Config, data_dir: str | None) -> Path | None:
    """Return the path of a run's tokenizer; None if MODEL is not set.

    Raises:
        ConfigError: it does not exist, does not match the model, or has no end-of-document token or chat template.
    """
    place = expanded(tokenizer_place(config, data_dir))
    if place is None:
        return None
    path = find_tokenizer(Path(place))
    check_vocabulary(path, num_ids(path), config.model.vocab_size)
    if not has_end(path):
        raise unnamed_token(path, "eos_token")
    if config.data is not None:
        template_sha256(config.data, path)
    return path


def has_end(tokenizer: Path) -> bool:
    """Return whether a tokenizer names the token that ends a document.

    In the cache of Hugging Face's hub all files are symbolic links.
    """
    if tokenizer.suffix == ".model" and sentencepiece_model.read(tokenizer).eos_id >= 0:
        return True
    return bool(atomic_files.read_object(tokenizer.with_name(TOKENIZER_CONFIG), follows_links=True).get("eos_token"))


def num_ids(tokenizer: Path) -> int:
    """Return the largest token id of a tokenizer plus one. Source: the format of Hugging Face's tokenizers.

    Raises:
        ConfigError: it is not a tokenizer.
    """
    if tokenizer.suffix == ".model":
        return len(sentencepiece_model.read(tokenizer).pieces)
    try:
        content = json.loads(tokenizer.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        largest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
        added = [token["id"] for token in content.get("added_tokens") or []]
        return int(max([largest, *added])) + 1
    except (KeyError, TypeError, AttributeError) as error:
        raise bad_tokenizer(tokenizer, "the file has no valid vocabulary (model.vocab, added_tokens)") from error
    except (OSError, ValueError, RecursionError) as error:
        raise bad_tokenizer(tokenizer, error) from error


def bad_tokenizer(path: Path, error: object) -> ConfigError:
    """Return the error for a damaged file of a tokenizer: tokenizer.json, tokenizer.model or a file next to them."""
    return ConfigError(
        f"{path.name} cannot be used: {error}",
        where=str(path),
        fix=f"set MODEL or data.tokenizer to the folder of the model's tokenizer, or download {path.name} again",
        rule="CFG-06",
    )


def unnamed_token(path: Path, name: str) -> ConfigError:
    """Return the error for a tokenizer without a special token, such as eos_token."""
    return ConfigError(
        f"the tokenizer has no {name}",
        where=str(path.with_name(TOKENIZER_CONFIG)),
        fix=f"copy the model's {TOKENIZER_CONFIG}, which must set {name}, to the folder of {path.name}",
        rule="CFG-06",
    )


def check_vocabulary(tokenizer: Path, ids: int, vocab_size: int) -> None:
    """Raise ConfigError if the tokenizer's vocabulary is larger than the model's."""
    if ids > vocab_size:
        raise ConfigError(
            f"the tokenizer has token ids up to {ids - 1:,}, but the model's vocabulary size is {vocab_size:,}",
            where=str(tokenizer),
            fix="set model= to the model of this tokenizer, or set data.tokenizer to the tokenizer of the model",
            rule="CFG-06",
        )


def template_sha256(data: Data, tokenizer: Path) -> str | None:
    """Return one checksum of the chat templates; None for sources without them."""
    return fingerprint(chat.templates(tokenizer, data.chat_template)) if data.source is DataSource.chat else None


def check_same_tokenizer(rows: Path, used: dict[str, Any], tokenizer: Path, data: Data) -> None:
    """Raise ConfigError if rows were prepared with another tokenizer or chat template; `used` is in their manifest."""
    if atomic_files.sha256(tokenizer) != used.get("sha256"):
        raise ConfigError(
            f"the rows were prepared with the tokenizer {used.get('file')}, but this run has another tokenizer",
            where=f"{rows}, {tokenizer}",
            fix="set data.tokenizer to the tokenizer of the prepared rows, or delete the folder of the prepared rows",
            rule="CFG-06",
        )
    if used.get("chat_template") != template_sha256(data, tokenizer):
        raise ConfigError(
            "the rows were prepared with a chat template that differs from the chat template of this run",
            where=f"{rows}, {data.chat_template or tokenizer.parent}",
            fix="restore the chat template of the prepared rows, or delete the folder of the prepared rows",
            rule="CFG-06",
        )


def check_room(root: Path, data: Data) -> None:
    """Raise BenchError if the disk of a folder, which may not exist yet, has too little space for the rows.

    The space for rows that are not counted yet is unknown.
    """
    if data.train_rows is None:
        return
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    needed, free = room_needed(data), shutil.disk_usage(existing).free
    if free < needed:
        raise BenchError(
            f"the prepared rows need about {needed / 1e9:,.2f} GB, but only {free / 1e9:,.2f} GB are free on the disk",
            where=str(existing),
            fix="free disk space, or lower data.train_rows",
            rule="CFG-08",
        )


def read_record(raw: Any, data: Data) -> Any:
    """Return a record with the columns of its source: all texts, or a `Conversation` for the source chat.

    Raises:
        ValueError: the record does not have the source's format; the text says what is wrong.
    """
    if data.source is DataSource.chat:
        return chat.conversation(raw, data.named_columns)
    record, columns = _with_our_columns(raw, data.source), columns_of(data)
    if wrong := check_record(record, columns):
        raise ValueError(wrong)
    return {"text": record[columns[0]]} if data.source is DataSource.text else record


def columns_of(data: Data) -> tuple[str, ...]:
    """Return the columns that each record of a source has, except chat, whose columns depend on the file."""
    return (data.named_columns.text,) if data.source is DataSource.text else FORMATS[data.source].columns


def columns_in_file(names: list[str], data: Data) -> tuple[str, ...]:
    """Return which columns of a parquet file are read.

    Raises:
        ValueError: a column is missing.
    """
    if data.source is DataSource.chat:
        return chat.columns_of(names, data.named_columns)
    if missing := [name for name in columns_of(data) if name not in names]:
        raise ValueError(f"the file has no column {', '.join(missing)}; its columns are {', '.join(names)}")
    return columns_of(data)


def _with_our_columns(record: Any, source: DataSource) -> Any:
    """Return a record of PubMedQA's own files with our columns and its contexts joined; other records unchanged."""
    if source is not DataSource.pubmedqa or not isinstance(record, dict) or not record.keys() & PUBMEDQA_KEYS.keys():
        return record
    ours = {PUBMEDQA_KEYS.get(name, name): value for name, value in record.items()}
    contexts = ours.get("context")
    if isinstance(contexts, list) and all(isinstance(text, str) for text in contexts):
        ours["context"] = "\n".join(contexts)
    return ours


def check_record(record: Any, columns: tuple[str, ...]) -> str | None:
    """Return the problem of a record; None if every column is a text."""
    if not isinstance(record, dict):
        return f"a record must be a JSON object, but this record has the type {type(record).__name__}"
    for name in columns:
        if name not in record:
            return f"a record must have a column {name}, but has the columns {', '.join(map(str, record)) or 'none'}"
        if not isinstance(record[name], str):
            return f"column {name} must be text, but has the type {type(record[name]).__name__}"
        if problem := broken_text(record[name]):
            return f"column {name} {problem}"
    return None


def broken_text(text: str) -> str | None:
    """Return the problem of a text that cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains an unpaired surrogate, which is not a valid character"
    return None


def columns_fix(data: Data) -> str:
    """Return the fix for records in another format."""
    source = data.source
    if source is DataSource.chat:
        return chat.columns_fix(data.named_columns)
    if source is DataSource.text:
        return "set data.columns.text to the name of a column that has text in every record"
    columns = ", ".join(FORMATS[source].columns)
    own = f" (or {', '.join(PUBMEDQA_KEYS)}, as in PubMedQA's own files)" if source is DataSource.pubmedqa else ""
    return f"write text into these columns of each record: {columns}{own}; or set data.source to the format of the file"


def room_needed(data: Data) -> int:
    """Return the approximate disk space in bytes for preparing the rows."""
    return (data.num_train_rows + data.eval_rows) * data.seq_length * (BYTES_PER_TOKEN + data.document_mask)
