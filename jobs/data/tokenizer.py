"""A model's own tokenizer.json, through Hugging Face's tokenizers, and where a document begins and ends.

A document is BOS (where the tokenizer adds one), its tokens, EOS. Whether there is a BOS says add_bos_token in
tokenizer_config.json or, without it, the post-processor of tokenizer.json. EOS is eos_token of tokenizer_config.json. A
special token that is written out in a text, such as </s>, is text and never ends a document.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.contract.data_files import TOKENIZER_CONFIG, bad_tokenizer, unnamed_token
from jobs.data import words

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Tokenizers


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
    return Tokenizer(inner, words.of(inner), bos if adds_bos else None, eos, eos if pad is None else pad, num_ids)


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
