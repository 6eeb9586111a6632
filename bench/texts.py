"""The texts in a config or a plan: where each of them stands, and which characters none of them may hold."""

import dataclasses
import unicodedata
from collections.abc import Iterator
from typing import Any

STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of what steers a terminal, a shell or a line of a file: control characters (newline, tab, NUL),
formats (directions of writing, invisible ones), lone surrogates, separators of lines and paragraphs."""
SHOWN = 60
"""Characters of a value that a message quotes."""


def strings(value: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield place, last name and text of every string in a config, a plan or a JSON object, and of every key in it."""
    if isinstance(value, str):
        yield key, key.rpartition(".")[2], value
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from strings(getattr(value, item.name), f"{key}.{item.name}")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield key, "", str(name)
            yield from strings(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from strings(item, f"{key}[{number}]")


def steering(text: str) -> str:
    """Return the first character that steers what shows or reads a text, or nothing."""
    return next((letter for letter in text if unicodedata.category(letter) in STEERING), "")


def quoted(text: str) -> str:
    """Return a text as a message may show it: in quotes, on one line, not too long."""
    return ascii(text) if len(text) <= SHOWN else f"{ascii(text[:SHOWN])}… ({len(text):,} characters)"
