"""Prompts of an exact number of tokens, by the tokenizer that the server itself has."""

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from bench.errors import ConfigError

MAX_WORDS, TRIES = 4096, 50


def tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder.

    Raises:
        ConfigError: there is none that can be read.
    """
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself
        raise ConfigError(
            f"the tokenizer cannot be read: {error}",
            where=str(file),
            fix="name a folder with tokenizer.json; transformers writes one with AutoTokenizer(…).save_pretrained",
            rule="CFG-06",
        ) from error


def drawn(own: Tokenizer, *, count: int, num_tokens: int, seed: int) -> list[str]:
    """Return different prompts of random words, each of exactly so many tokens, special ones included.

    Each is encoded, decoded and encoded again: a server that does either gets the same tokens.

    Raises:
        ConfigError: the tokenizer has no words that make such prompts.
    """
    words, generator = _words(own), random.Random(seed)
    special = len(own.encode("").ids)
    if num_tokens <= special or not words:
        what = f"no prompt of {num_tokens} tokens can be made: {len(words)} words, {special} special tokens"
        raise ConfigError(what, where="task.serving.tokens_in", fix="ask for more tokens, or name another tokenizer")
    return [_prompt(own, words, num_tokens, generator) for _ in range(count)]


def _words(own: Tokenizer) -> list[str]:
    """Return words that are one token each where they stand between others."""
    special = len(own.encode("").ids)
    return sorted({word for word in _candidates(own) if len(own.encode(f"{word} {word} {word}").ids) - special == 3})


def _candidates(own: Tokenizer) -> Iterator[str]:
    """Yield the texts of tokens that are plain words, as many as prompts need to differ."""
    count = 0
    for token in range(own.get_vocab_size()):
        word = own.decode([token]).strip()
        if word.isascii() and word.isalnum() and len(word) > 1:
            count += 1
            yield word
        if count == MAX_WORDS:
            return


def _prompt(own: Tokenizer, words: list[str], num_tokens: int, generator: random.Random) -> str:
    """Return a prompt whose length is right after encoding, and stays so after decoding."""
    for _ in range(TRIES):
        chosen = generator.choices(words, k=num_tokens)
        while chosen and (over := len(own.encode(" ".join(chosen)).ids) - num_tokens) > 0:
            del chosen[-over:]
        text = " ".join(chosen)
        ids = own.encode(text).ids
        if len(ids) == num_tokens and own.encode(own.decode(ids)).ids == ids:
            return text
    raise ConfigError(
        f"no prompt of {num_tokens} tokens survives encoding and decoding in {TRIES} tries",
        where="task.serving.tokens_in",
        fix="ask for another number of tokens, or name another tokenizer",
    )
