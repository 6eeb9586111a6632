"""Random prompts with an exact number of tokens in the server's tokenizer."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench.errors import ConfigError

MAX_WORDS, TRIES = 4096, 50
WHERE = "task.serving.tokens_in, task.serving.lengths"


def tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder.

    Raises:
        ConfigError: it is missing or cannot be read.
    """
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ConfigError(
            f"the tokenizer cannot be read: {error}",
            where=str(file),
            fix="set MODEL to a folder with a tokenizer.json that save_pretrained of transformers wrote; for a server "
            "at task.serving.server.url, set task.serving.server.tokenizer instead of MODEL",
            rule="CFG-06",
        ) from error


def random_prompts(own: Tokenizer, *, lengths: Sequence[int], seed: int) -> list[str]:
    """Return a prompt of random words for each length, with exactly so many tokens, special tokens included.

    Each prompt keeps its tokens when it is encoded, decoded and encoded again, as some servers do.

    Raises:
        ConfigError: the tokenizer cannot produce such prompts.
    """
    words, generator = _words(own), random.Random(seed)
    special = len(own.encode("").ids)
    if min(lengths) <= special or not words:
        what = (
            f"no prompt can have {min(lengths)} tokens: the tokenizer has {len(words)} words of one token, "
            f"and adds {special} special tokens"
        )
        raise ConfigError(
            what,
            where=WHERE,
            fix="raise task.serving.tokens_in or the shortest length of task.serving.lengths, or set another tokenizer",
        )
    return [_prompt(own, words, num_tokens, generator) for num_tokens in lengths]


def _words(own: Tokenizer) -> list[str]:
    """Return words that are one token each between other words."""
    special = len(own.encode("").ids)
    return sorted({text for text in _candidates(own) if len(own.encode(f"{text} {text} {text}").ids) - special == 3})


def _candidates(own: Tokenizer) -> Iterator[str]:
    """Yield the texts of tokens that are plain words, at most MAX_WORDS."""
    count = 0
    for token in range(own.get_vocab_size()):
        text = own.decode([token]).strip()
        if text.isascii() and text.isalnum() and len(text) > 1:
            count += 1
            yield text
        if count == MAX_WORDS:
            return


def _prompt(own: Tokenizer, words: list[str], num_tokens: int, generator: random.Random) -> str:
    """Return a prompt that has num_tokens tokens, also after decoding and encoding again."""
    for _ in range(TRIES):
        chosen = generator.choices(words, k=num_tokens)
        while chosen and (over := len(own.encode(" ".join(chosen)).ids) - num_tokens) > 0:
            del chosen[-over:]
        text = " ".join(chosen)
        ids = own.encode(text).ids
        if len(ids) == num_tokens and own.encode(own.decode(ids)).ids == ids:
            return text
    raise ConfigError(
        f"none of {TRIES} random prompts has {num_tokens} tokens and keeps them when it is decoded and encoded again",
        where=WHERE,
        fix="change task.serving.tokens_in or task.serving.lengths, or set another tokenizer",
    )
