"""Tokenise texts word by word, each word once, where that gives the same tokens as the whole text.

A word is what stands between two spaces, and most words of a text were seen before. A tokenizer works on pieces that
its pre-tokenizer cuts, and no token reaches from one piece into the next. Where a space that follows another character
always begins a piece, a text can be cut there first. That is known of

- byte-level tokenizers with GPT-2's or Llama 3's pattern: neither has an alternative that goes on from another
  character to a space (Llama 3's takes line ends behind punctuation, but no space);
- SentencePiece's BPE as in Llama 2, which has no pre-tokenizer, if no token of its vocabulary holds a space (▁) behind
  another character, since each merge makes a token of the vocabulary.

Any other tokenizer gets whole texts.
"""

import json
import re
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


def of(tokenizer: "Tokenizer") -> Callable[[list[str]], list[list[int]]]:
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
