"""Tokenise files into blocks on disk. A finished block survives an interruption, and is verified by its checksums.

NNNNNN.tokens has the tokens of a block's documents one after another (int32), NNNNNN.documents the length of each
document and of its prompt (int32), NNNNNN.json the description; it is written last. Conversations also have
NNNNNN.counts: which tokens are in the loss (bool).
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.contract import atomic_files, chat
from bench.contract.data import Data, DataSource
from jobs.data import records, sources, splits
from jobs.data import tokenizer as tokenizers
from jobs.data.chat_template import ChatTemplate, Rendered, Skipped
from jobs.data.records import Block
from jobs.data.tokenizer import Tokenizer
from jobs.data.workers import Submit
from jobs.ranks.progress import tracked

PARTS: dict[DataSource, Callable[[dict[str, str], Any], tuple[str, str]]] = {
    DataSource.fineweb_edu: sources.fineweb_edu,
    DataSource.c4: sources.c4,
    DataSource.dolly: sources.dolly,
    DataSource.pubmedqa: sources.pubmedqa,
    DataSource.text: sources.text,
}
TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that a chat template may use. Source: transformers 5.23.0, special_tokens_map."""
DTYPES = {"tokens": "<i4", "documents": "<i4", "counts": "|b1"}
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
    """Skipped records: without text, without an answer, or without a turn of the assistant."""
    sha256: dict[str, str]
    num_with_special_tokens: int = 0
    """Skipped conversations: a special token is spelled out in a turn."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A document: its tokens [T], the length of its prompt, and for conversations which tokens count [T]."""

    tokens: np.ndarray
    prompt: int
    counts: np.ndarray | None = None


class TextEncoder:
    """Encodes records of texts: a prompt, which may be empty, and an answer."""

    files = ("tokens", "documents")

    def __init__(self, data: Data, tokenizer: Tokenizer) -> None:
        self._parts, self._kind, self._tokenizer = PARTS[data.source], data.prompt_type, tokenizer

    def convert(self, record: Any) -> tuple[str, str]:
        return self._parts(record, self._kind)

    def size(self, parts: tuple[str, str]) -> int:
        return sum(map(len, parts))

    def encode(self, batch: list[tuple[str, str]], counted: dict[str, int]) -> list[Encoded]:
        full = [parts for parts in batch if parts[1].strip()]
        counted["num_empty"] += len(batch) - len(full)
        return [Encoded(*one) for one in tokenizers.encode(self._tokenizer, full)] if full else []


class ChatEncoder:
    """Encodes conversations with the chat template of the tokenizer."""

    files = ("tokens", "documents", "counts")

    def __init__(self, data: Data, tokenizer: Tokenizer, file: Path) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(
            chat.templates(file, data.chat_template),
            variables=chat.token_texts(tokenizers.config_of(file), TEMPLATE_TOKENS),
            specials=tokenizers.special_tokens(tokenizer),
            where=data.chat_template or str(file.parent),
        )

    def convert(self, record: Any) -> Rendered | Skipped:
        return self._template.render(record)

    def size(self, rendered: Rendered | Skipped) -> int:
        return len(rendered.text) if isinstance(rendered, Rendered) else 0

    def encode(self, batch: list[Rendered | Skipped], counted: dict[str, int]) -> list[Encoded]:
        counted["num_empty"] += batch.count(Skipped.without_assistant)
        counted["num_with_special_tokens"] += batch.count(Skipped.special_token)
        full = [one for one in batch if isinstance(one, Rendered)]
        return [Encoded(*one) for one in tokenizers.encode_conversations(self._tokenizer, full)]


Encoder = TextEncoder | ChatEncoder


def encoder_of(data: Data, file: Path) -> Encoder:
    """Return the encoder of a source's records with the tokenizer in this file.

    Raises:
        ConfigError: the tokenizer or its chat template cannot be read.
    """
    tokenizer = tokenizers.load(file)
    is_chat = data.source is DataSource.chat
    return ChatEncoder(data, tokenizer, file) if is_chat else TextEncoder(data, tokenizer)


def tokenize_block(block: Block, number: int, folder: Path, *, data: Data, encoder: Encoder) -> TokenBlock:
    """Tokenise a block into a folder, unless a complete one exists; return its description."""
    if (existing := _finished_block(folder, number, block)) is not None:
        return existing
    digests = {name: hashlib.sha256() for name in encoder.files}
    names = ("num_documents", "num_tokens", "longest", "num_empty", "num_with_special_tokens")
    counted = dict.fromkeys(names, 0)
    with ExitStack() as stack:
        files = {name: stack.enter_context(_path(folder, number, f"{name}.part").open("wb")) for name in encoder.files}
        for encoded in _batches(records.read(block, data, encoder.convert), encoder, counted):
            for name, array in _arrays(encoded, counted).items():
                files[name].write(array.tobytes())
                digests[name].update(array.tobytes())
    for name in encoder.files:
        _path(folder, number, f"{name}.part").rename(_path(folder, number, name))
    sha256 = {name: digest.hexdigest() for name, digest in digests.items()}
    done = TokenBlock(block, number, **counted, sha256=sha256)
    _path(folder, number, "json.part").write_text(json.dumps(asdict(done)))
    _path(folder, number, "json.part").rename(_path(folder, number, "json"))
    return done


def _arrays(encoded: list[Encoded], counted: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the arrays to write for some documents, and add to the counts."""
    arrays = {
        "tokens": np.concatenate([one.tokens for one in encoded]),
        "documents": np.array([(len(one.tokens), one.prompt) for one in encoded]),
    }
    if counts := [one.counts for one in encoded if one.counts is not None]:
        arrays["counts"] = np.concatenate(counts)
    counted["num_documents"] += len(encoded)
    counted["num_tokens"] += len(arrays["tokens"])
    counted["longest"] = max(counted["longest"], *(len(one.tokens) for one in encoded))
    return {name: array.astype(DTYPES[name]) for name, array in arrays.items()}


def _batches(converted: Iterable[Any], encoder: Encoder, counted: dict[str, int]) -> Iterator[list[Encoded]]:
    """Yield the documents of batches that have at least one."""
    batch, letters = list[Any](), 0
    for one in converted:
        batch.append(one)
        letters += encoder.size(one)
        if len(batch) == BATCH_RECORDS or letters >= BATCH_LETTERS:
            if encoded := encoder.encode(batch, counted):
                yield encoded
            batch, letters = [], 0
    if batch and (encoded := encoder.encode(batch, counted)):
        yield encoded


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
    return _mapped(folder, block, "tokens", (block.num_tokens,))


def counts(folder: Path, block: TokenBlock) -> np.ndarray | None:
    """Return which tokens of a block's conversations count, memory-mapped; None if their prompts tell."""
    return _mapped(folder, block, "counts", (block.num_tokens,)) if "counts" in block.sha256 else None


def documents(folder: Path, block: TokenBlock) -> np.ndarray:
    """Return the length of each document and of its prompt, [documents, 2], memory-mapped."""
    return _mapped(folder, block, "documents", (block.num_documents, 2))


def _mapped(folder: Path, block: TokenBlock, name: str, shape: tuple[int, ...]) -> np.ndarray:
    dtype = DTYPES[name]
    return np.memmap(_path(folder, block.number, name), dtype, "r", shape=shape) if shape[0] else np.empty(shape, dtype)


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
        skipped = sum(block.num_empty + block.num_with_special_tokens for block in blocks)
        what = (
            f"the files have no records to train on: {skipped:,} were skipped"
            if skipped
            else "the files have no records"
        )
        fix = "set data.files to files with records that have a text, or an answer, or a turn of the assistant"
        raise records.refused(what, str(sources[0]), fix)
    return blocks


def _progress_total(sources: list[Path], data: Data) -> tuple[float, str, Callable[[dict[str, Any]], float]]:
    """Return total, unit and size function of the progress: tokens if a known number is enough, else bytes read."""
    megabytes = sum(path.stat().st_size for path in sources) / 1e6
    if data.packing and data.test_split is None and data.train_rows is not None:
        needed = (data.eval_rows + data.num_train_rows) * data.seq_length / 1e6
        return needed, "million tokens", lambda answer: answer["num_tokens"] / 1e6
    return megabytes, "MB", lambda answer: answer["block"]["num_bytes"] / 1e6
