"""A model's own tokenizer.json, through Hugging Face's tokenizers, and where a document begins and ends.

A document is BOS (where the tokenizer adds one), its tokens, EOS. Whether there is a BOS says add_bos_token in
tokenizer_config.json or, without it, the post-processor of tokenizer.json. EOS is eos_token of tokenizer_config.json. A
special token that is written out in a text, such as </s>, is text and never ends a document.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.contract.data_files import TOKENIZER_CONFIG, bad_tokenizer, unnamed_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Tokenizers


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = "▁"
"""What SentencePiece writes for a space."""
MOST_WORDS = 2**20
"""A cache that is larger is emptied before the next batch."""
_CUT = re.compile(r" (?<=\S )")
"""A space behind another character. What Unicode calls white space is white space for Python's \\s too."""
_INNER_SPACE = re.compile(f"[^{SPACE}]{SPACE}")


class Words:
    """The tokens of each word that was seen, for one tokenizer."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], *, space: str, odd: str) -> None:
        """`space` is put before all words but the first; texts that hold `odd`, if it is not empty, are left alone."""
        self._encode, self._space, self._odd = encode, space, odd
        self._known: dict[str, list[int]] = {}

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        if len(self._known) > MOST_WORDS:
            self._known.clear()
        cut = [self._cut(text) for text in texts]
        missing = list(set(chain.from_iterable(cut)).difference(self._known))
        self._known.update(zip(missing, self._encode(missing), strict=True))
        known = self._known.__getitem__
        return [list(chain.from_iterable(map(known, words))) for words in cut]

    def _cut(self, text: str) -> list[str]:
        """Return the pieces of a text; itself, where a piece would be empty or a text cannot be cut."""
        first, *others = _CUT.split(text)
        if "" in others or (self._odd and self._odd in text):
            return [text]
        return [first, *[self._space + word for word in others]] if self._space else [first, *others]


def of(tokenizer: "Tokenizers") -> Callable[[list[str]], list[list[int]]]:
    """Return what gives the tokens of texts: by words where the tokenizer is known to allow it."""

    def whole(texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    written = json.loads(tokenizer.to_str())
    if any(not token["special"] for token in written["added_tokens"]) or written["model"].get("type") != "BPE":
        return whole
    if written["model"].get("dropout"):
        return whole
    if _is_byte_level(written):
        return Words(whole, space=" ", odd="").ids
    if _is_sentencepiece(written):
        return Words(whole, space="", odd=SPACE).ids
    return whole


def _is_byte_level(written: dict[str, Any]) -> bool:
    """Return whether a tokenizer cuts as GPT-2's or Llama 3's does, and does nothing else to a text."""
    cutter = written["pre_tokenizer"] or {}
    if written["normalizer"] is not None or written["model"].get("continuing_subword_prefix"):
        return False
    if cutter.get("type") == "ByteLevel":
        return bool(cutter["use_regex"]) and not cutter["add_prefix_space"]
    steps = cutter.get("pretokenizers", [])
    if [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return False
    split, bytes_ = steps
    plain = split["behavior"] == "Isolated" and not split["invert"] and split["pattern"] == {"Regex": LLAMA_3}
    return plain and not bytes_["use_regex"] and not bytes_["add_prefix_space"]


def _is_sentencepiece(written: dict[str, Any]) -> bool:
    """Return whether a tokenizer writes ▁ for spaces and before the text, as Llama 2's does, and merges over none."""
    prepend, replace = {"type": "Prepend", "prepend": SPACE}, {"String": " "}
    steps = (written["normalizer"] or {}).get("normalizers", [])
    if written["pre_tokenizer"] is not None or len(steps) != 2 or steps[0] != prepend:
        return False
    replaces = steps[1].get("type") == "Replace" and steps[1]["pattern"] == replace and steps[1]["content"] == SPACE
    model = written["model"]
    has_bytes = bool(model.get("byte_fallback")) and all(f"<0x{i:02X}>" in model["vocab"] for i in range(256))
    return replaces and has_bytes and not _has_inner_space(model["vocab"])


def _has_inner_space(vocab: Iterable[str]) -> bool:
    return any(_INNER_SPACE.search(token) for token in vocab)


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer with the tokens around a document."""

    inner: "Tokenizers"
    ids: Callable[[list[str]], list[list[int]]]
    """The tokens of whole texts, faster than `inner` where words come again."""
    bos: int | None
    """None: documents begin without one."""
    eos: int
    pad: int
    """EOS where the tokenizer has no padding token; padding never counts."""
    num_ids: int
    """One more than the largest token."""


def load(path: Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json and the tokenizer_config.json beside it.

    Raises:
        ConfigError: it cannot be read, or it does not say how a document ends.
    """
    from tokenizers import Tokenizer as Tokenizers

    try:
        inner = Tokenizers.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
        raise bad_tokenizer(path, error) from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    config = _config(path.with_name(TOKENIZER_CONFIG))
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
    return Tokenizer(inner, of(inner), bos if adds_bos else None, eos, eos if pad is None else pad, num_ids)


def _config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return dict(config)
    except (OSError, ValueError, TypeError) as error:
        raise bad_tokenizer(path, error) from error


def _token(inner: "Tokenizers", config: dict[str, Any], name: str, path: Path) -> int | None:
    """Return the number of a token that the config names, as a text or as {"content": text}."""
    text = config.get(name)
    text = text.get("content") if isinstance(text, dict) else text
    if text is None:
        return None
    if (number := inner.token_to_id(text)) is None:
        raise bad_tokenizer(path, f"it has no token {text!r}, which {TOKENIZER_CONFIG} names as {name}")
    return int(number)


def encode(tokenizer: Tokenizer, parts: Sequence[tuple[str, str]]) -> list[tuple[np.ndarray, int]]:
    """Return each document's tokens and how many of them are its prompt's, from (prompt, answer).

    Prompt and answer are tokenised as one text. A token that reaches from the prompt into the answer is the answer's:
    the model has to write it.
    """
    texts = [prompt + answer for prompt, answer in parts]
    if not any(prompt for prompt, _ in parts):
        return [(_document(tokenizer, ids), 0) for ids in tokenizer.ids(texts)]
    encodings = tokenizer.inner.encode_batch(texts, add_special_tokens=False)
    return [
        (_document(tokenizer, encoding.ids), _num_before(tokenizer, encoding.offsets, len(prompt)))
        for encoding, (prompt, _) in zip(encodings, parts, strict=True)
    ]


def _document(tokenizer: Tokenizer, ids: list[int]) -> np.ndarray:
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    return np.array([*begin, *ids, tokenizer.eos], dtype=np.int32)


def _num_before(tokenizer: Tokenizer, offsets: list[tuple[int, int]], prompt_length: int) -> int:
    """Return how many tokens, with BOS, end before the answer begins."""
    inside = next((i for i, (_, end) in enumerate(offsets) if end > prompt_length), len(offsets))
    return inside + (tokenizer.bos is not None)
