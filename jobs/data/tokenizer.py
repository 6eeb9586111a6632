"""Load a model's tokenizer.json or tokenizer.model with Hugging Face's tokenizers, and encode documents.

A document of text is BOS (if the tokenizer adds one), its tokens, EOS. Whether there is a BOS is set by add_bos_token
in tokenizer_config.json or, without it, by the post-processor of tokenizer.json. EOS is eos_token of
tokenizer_config.json. A special token that is spelled out in a text, such as </s>, is text and never ends a document.
A conversation has the special tokens that its chat template writes, and no others.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.contract import chat, sentencepiece_model
from bench.contract.data_files import TOKENIZER_CONFIG, bad_tokenizer, unnamed_token
from jobs.data.chat_template import Rendered

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Tokenizers


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "▁"
"""SentencePiece's symbol for a space."""
MOST_WORDS = 2**20
"""A larger cache is cleared before the next batch."""
_CUT = re.compile(r" (?<=\S )")
"""A space after a character that is not white space; Python's \\s covers Unicode's white space."""
_INNER_SPACE = re.compile(f"[^{SPACE}]{SPACE}")


class WordCache:
    """Caches the tokens of each word of one tokenizer."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], *, space: str, odd: str) -> None:
        """`space` is put before all words but the first; texts that contain `odd` (if not "") are encoded whole."""
        self._encode, self._space, self._odd = encode, space, odd
        self._known: dict[str, list[int]] = {}

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        if len(self._known) > MOST_WORDS:
            self._known.clear()
        cut = [self._cut(text) for text in texts]
        missing = list(set(chain.from_iterable(cut)).difference(self._known))
        self._known.update(zip(missing, self._encode(missing), strict=True))
        known = self._known.__getitem__
        return [list(chain.from_iterable(map(known, words))) for words in cut]

    def _cut(self, text: str) -> list[str]:
        """Return the words of a text; the whole text if a word would be empty or the text cannot be split."""
        first, *others = _CUT.split(text)
        if "" in others or (self._odd and self._odd in text):
            return [text]
        return [first, *[self._space + other for other in others]] if self._space else [first, *others]


def encoder_of(tokenizer: "Tokenizers") -> Callable[[list[str]], list[list[int]]]:
    """Return a function that encodes texts: word by word with a cache if the tokenizer is known to allow it."""

    def whole(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    definition = json.loads(tokenizer.to_str())
    if any(not token["special"] for token in definition["added_tokens"]) or definition["model"].get("type") != "BPE":
        return whole
    if definition["model"].get("dropout"):
        return whole
    if _is_byte_level(definition):
        return WordCache(whole, space=" ", odd="").ids
    if _is_sentencepiece(definition):
        return WordCache(whole, space="", odd=SPACE).ids
    return whole


def _is_byte_level(definition: dict[str, Any]) -> bool:
    """Return whether a tokenizer splits text as GPT-2's or Llama 3's, and changes nothing else."""
    pre_tokenizer = definition["pre_tokenizer"] or {}
    if definition["normalizer"] is not None or definition["model"].get("continuing_subword_prefix"):
        return False
    if pre_tokenizer.get("type") == "ByteLevel":
        return bool(pre_tokenizer["use_regex"]) and not pre_tokenizer["add_prefix_space"]
    steps = pre_tokenizer.get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, bytes_ = steps
    plain = split["behavior"] == "Isolated" and not split["invert"] and split["pattern"] == {"Regex": LLAMA_3}
    return plain and not bytes_["use_regex"] and not bytes_["add_prefix_space"]


def _is_sentencepiece(definition: dict[str, Any]) -> bool:
    """Return whether a tokenizer writes ▁ for spaces and before the text, as Llama 2's, and never merges across it."""
    prepend, replace = {"type": "Prepend", "prepend": SPACE}, {"String": " "}
    steps = (definition["normalizer"] or {}).get("normalizers", [])
    if definition["pre_tokenizer"] is not None or len(steps) != 2 or steps[0] != prepend:
        return False
    replaces = steps[1].get("type") == "Replace" and steps[1]["pattern"] == replace and steps[1]["content"] == SPACE
    model = definition["model"]
    has_bytes = bool(model.get("byte_fallback")) and all(f"<0x{i:02X}>" in model["vocab"] for i in range(256))
    return replaces and has_bytes and not _has_inner_space(model["vocab"])


def _has_inner_space(vocab: Iterable[str]) -> bool:
    return any(_INNER_SPACE.search(token) for token in vocab)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer with its BOS, EOS and padding tokens."""

    inner: "Tokenizers"
    ids: Callable[[list[str]], list[list[int]]]
    """Encodes whole texts, faster than `inner` if words repeat."""
    bos: int | None
    """None: documents have no BOS."""
    eos: int
    pad: int
    """EOS if the tokenizer has no padding token; padding never counts."""
    num_ids: int
    """Largest token id + 1."""


def load(path: Path) -> Tokenizer:
    """Load a tokenizer.json or tokenizer.model, and the tokenizer_config.json in the same folder.

    Raises:
        ConfigError: it cannot be read, or it has no EOS.
    """
    config = config_of(path)
    inner = _loaded(path, config)
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    added = inner.encode("", add_special_tokens=True).ids
    eos = _token(inner, config, "eos_token", path)
    bos = _token(inner, config, "bos_token", path)
    adds_bos = config.get("add_bos_token", bool(added) and added[0] != eos)
    if adds_bos and bos is None:
        bos = next(iter(added), None)
    if eos is None or (adds_bos and bos is None):
        raise unnamed_token(path, "eos_token" if eos is None else "bos_token")
    pad = _token(inner, config, "pad_token", path)
    num_ids = 1 + max(inner.get_vocab(with_added_tokens=True).values())
    return Tokenizer(inner, encoder_of(inner), bos if adds_bos else None, eos, eos if pad is None else pad, num_ids)


def _loaded(path: Path, config: dict[str, Any]) -> "Tokenizers":
    from tokenizers import Tokenizer as Tokenizers

    from jobs.data import sentencepiece

    if path.suffix == ".model":
        return sentencepiece.load(path, config)
    try:
        return Tokenizers.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise bad_tokenizer(path, error) from error


def config_of(path: Path) -> dict[str, Any]:
    """Return the settings next to a tokenizer; those of a SentencePiece model are completed from the model.

    Raises:
        ConfigError: tokenizer_config.json is damaged.
    """
    file, own = path.with_name(TOKENIZER_CONFIG), dict[str, Any]()
    if path.suffix == ".model":
        model = sentencepiece_model.read(path)
        ids = {"bos_token": model.bos_id, "eos_token": model.eos_id, "unk_token": model.unk_id}
        own = {name: model.piece(number) for name, number in ids.items() if model.piece(number) is not None}
        own["add_bos_token"] = "bos_token" in own
    if not file.exists():
        return own
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return own | dict(config)
    except (OSError, ValueError, TypeError) as error:
        raise bad_tokenizer(file, error) from error


def _token(inner: "Tokenizers", config: dict[str, Any], name: str, path: Path) -> int | None:
    """Return the id of a token in the config, which is a text or {"content": text}."""
    if (text := chat.token_texts(config, [name]).get(name)) is None:
        return None
    if (number := inner.token_to_id(text)) is None:
        raise bad_tokenizer(path, f"{name} in {TOKENIZER_CONFIG} is {text!r}, which is not a token of {path.name}")
    return int(number)


def encode(tokenizer: Tokenizer, parts: Sequence[tuple[str, str]]) -> list[tuple[np.ndarray, int]]:
    """Return each document's tokens and the number of prompt tokens, from (prompt, answer).

    Prompt and answer are tokenised as one text. A token that spans both belongs to the answer, since the model has to
    generate it.
    """
    texts = [prompt + answer for prompt, answer in parts]
    if not any(prompt for prompt, _ in parts):
        return [(_document(tokenizer, ids), 0) for ids in tokenizer.ids(texts)]
    encodings = tokenizer.inner.encode_batch(texts, add_special_tokens=False)
    return [
        (_document(tokenizer, encoding.ids), _num_before(tokenizer, encoding.offsets, len(prompt)))
        for encoding, (prompt, _) in zip(encodings, parts, strict=True)
    ]


def encode_conversations(
    tokenizer: Tokenizer, conversations: Sequence[Rendered]
) -> list[tuple[np.ndarray, int, np.ndarray]]:
    """Return each conversation's tokens, the number of tokens before the first that counts, and which ones count.

    A token counts if it has a character of the assistant's text.
    """
    tokenizer.inner.encode_special_tokens = False
    try:
        texts = [conversation.text for conversation in conversations]
        encodings = tokenizer.inner.encode_batch(texts, add_special_tokens=False)
    finally:
        tokenizer.inner.encode_special_tokens = True
    encoded = []
    for encoding, conversation in zip(encodings, conversations, strict=True):
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        counts = np.zeros(len(begins), dtype=bool)
        for start, end in conversation.spans:
            counts |= (begins < end) & (ends > start)
        first = int(counts.argmax()) if counts.any() else len(counts)
        encoded.append((np.array(encoding.ids, dtype=np.int32), first, counts))
    return encoded


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the texts of the special tokens."""
    added = tokenizer.inner.get_added_tokens_decoder()
    eos = tokenizer.inner.id_to_token(tokenizer.eos)
    return sorted({str(token.content) for token in added.values() if token.special} | {str(eos)})


def _document(tokenizer: Tokenizer, ids: list[int]) -> np.ndarray:
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    return np.array([*begin, *ids, tokenizer.eos], dtype=np.int32)


def _num_before(tokenizer: Tokenizer, offsets: list[tuple[int, int]], prompt_length: int) -> int:
    """Return how many tokens, with BOS, end before the answer begins."""
    inside = next((i for i, (_, end) in enumerate(offsets) if end > prompt_length), len(offsets))
    return inside + (tokenizer.bos is not None)
