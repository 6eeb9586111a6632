"""Tokenise files into blocks on disk. A finished block survives an interruption, and is verified by its checksums.

NNNNNN.tokens has the tokens of a block's documents one after another (int32), NNNNNN.documents the length of each
document and of its prompt (int32), NNNNNN.json the description; it is written last.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.contract import atomic_files
from bench.contract.data import Data, DataSource, PromptType
from jobs.data import records, sources, splits
from jobs.data import tokenizer as tokenizers
from jobs.data.records import Block
from jobs.data.tokenizer import Tokenizer
from jobs.data.workers import Submit
from jobs.ranks.progress import tracked

PARTS: dict[DataSource, Callable[[dict[str, str], Any], tuple[str, str]]] = {
    DataSource.fineweb_edu: sources.fineweb_edu,
    DataSource.c4: sources.c4,
    DataSource.dolly: sources.dolly,
    DataSource.pubmedqa: sources.pubmedqa,
}
FILES = ("tokens", "documents")
BATCH_RECORDS, BATCH_LETTERS = 256, 2**20
"""Limits of a batch, in records and in characters."""
VERSION = 1
"""Version of the tokenised blocks: if it is raised, older blocks are not used again."""


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """The description of a tokenised block."""

    block: Block
    number: int
    num_documents: int
    num_tokens: int
    longest: int
    """Tokens of its longest document."""
    num_empty: int
    """Skipped records: without text, or without an answer."""
    sha256: dict[str, str]


def tokenize_block(
    block: Block, number: int, folder: Path, *, source: DataSource, kind: PromptType | None, tokenizer: Tokenizer
) -> TokenBlock:
    """Tokenise a block into a folder, unless a complete one exists; return its description."""
    if (existing := _finished_block(folder, number, block)) is not None:
        return existing
    digests = {name: hashlib.sha256() for name in FILES}
    counted = dict.fromkeys(("num_documents", "num_tokens", "longest", "num_empty"), 0)
    with ExitStack() as stack:
        files = {name: stack.enter_context(_path(folder, number, f"{name}.part").open("wb")) for name in FILES}
        for batch in _batches(block, source, kind):
            full = [parts for parts in batch if parts[1].strip()]
            counted["num_empty"] += len(batch) - len(full)
            if not full:
                continue
            for name, array in _arrays(tokenizers.encode(tokenizer, full), counted).items():
                files[name].write(array.tobytes())
                digests[name].update(array.tobytes())
    for name in FILES:
        _path(folder, number, f"{name}.part").rename(_path(folder, number, name))
    sha256 = {name: digest.hexdigest() for name, digest in digests.items()}
    done = TokenBlock(block, number, **counted, sha256=sha256)
    _path(folder, number, "json.part").write_text(json.dumps(asdict(done)))
    _path(folder, number, "json.part").rename(_path(folder, number, "json"))
    return done


def _arrays(encoded: list[tuple[np.ndarray, int]], counted: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the arrays to write for some documents, and add to the counts."""
    tokens = np.concatenate([tokens for tokens, _ in encoded]).astype("<i4")
    documents = np.array([(len(tokens), prompt) for tokens, prompt in encoded], dtype="<i4")
    counted["num_documents"] += len(documents)
    counted["num_tokens"] += len(tokens)
    counted["longest"] = max(counted["longest"], int(documents[:, 0].max()))
    return {"tokens": tokens, "documents": documents}


def _batches(block: Block, source: DataSource, kind: PromptType | None) -> Iterator[list[tuple[str, str]]]:
    parts_of, batch, letters = PARTS[source], list[tuple[str, str]](), 0
    for record in records.read(block, source):
        batch.append(parts_of(record, kind))
        letters += sum(map(len, batch[-1]))
        if len(batch) == BATCH_RECORDS or letters >= BATCH_LETTERS:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


def from_plain(plain: dict[str, Any]) -> TokenBlock:
    """Return the inverse of `asdict`."""
    return TokenBlock(**plain | {"block": Block(**plain["block"])})


def _finished_block(folder: Path, number: int, block: Block) -> TokenBlock | None:
    """Return the description of a block that was tokenised before, if it is complete and unchanged."""
    try:
        done = from_plain(json.loads(_path(folder, number, "json").read_text()))
        same = all(atomic_files.sha256(_path(folder, number, name)) == digest for name, digest in done.sha256.items())
        return done if same and done.block == block else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def tokens(folder: Path, block: TokenBlock) -> np.ndarray:
    """Return a block's tokens, memory-mapped."""
    return _mapped(_path(folder, block.number, "tokens"), (block.num_tokens,))


def documents(folder: Path, block: TokenBlock) -> np.ndarray:
    """Return the length of each document and of its prompt, [documents, 2], memory-mapped."""
    return _mapped(_path(folder, block.number, "documents"), (block.num_documents, 2))


def _mapped(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(path, "<i4", "r", shape=shape) if shape[0] else np.empty(shape, dtype="<i4")


def _path(folder: Path, number: int, name: str) -> Path:
    return folder / f"{number:06}.{name}"


_LOG = logging.getLogger(__name__)


def tokenize_files(submit: Submit, sources: list[Path], data: Data) -> list[TokenBlock]:
    """Return the tokenised blocks in order, only as many as the rows need.

    Raises:
        ConfigError: a file is damaged or has another format, or no file has a record.
    """
    cut = itertools.chain.from_iterable(map(records.cut, sources))
    results = submit({"block": asdict(block), "number": number} for number, block in enumerate(cut))
    total, unit, size = _progress_total(sources, data)
    blocks, documents, tokens, longest = list[TokenBlock](), 0, 0, 0
    for result in tracked(results, what=f"{data.name} tokenised", total=total, unit=unit, size=size):
        blocks.append(from_plain(result))
        documents, tokens = documents + blocks[-1].num_documents, tokens + blocks[-1].num_tokens
        longest = max(longest, blocks[-1].longest)
        if splits.are_enough(data, num_documents=documents, num_tokens=tokens, longest=longest):
            last = sources.index(Path(blocks[-1].block.path))
            _LOG.info("%s: %d of %d files are enough", data.name, last + 1, len(sources))
            break
    if not documents:
        raise records.refused("the files have no records", str(sources[0]), "set data.files to files with records")
    return blocks


def _progress_total(sources: list[Path], data: Data) -> tuple[float, str, Callable[[dict[str, Any]], float]]:
    """Return total, unit and size function of the progress: tokens if a known number is enough, else bytes read."""
    megabytes = sum(path.stat().st_size for path in sources) / 1e6
    if data.packing and data.test_split is None:
        needed = (data.eval_rows + data.train_rows) * data.seq_length / 1e6
        return needed, "million tokens", lambda answer: answer["num_tokens"] / 1e6
    return megabytes, "MB", lambda answer: answer["block"]["num_bytes"] / 1e6
