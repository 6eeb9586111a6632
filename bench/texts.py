"""Texts in a config or a plan, their control characters, and parts of messages: quotes, numbers, suggestions."""

import dataclasses
import difflib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

CONTROL_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that can change what a terminal, a shell or a file shows: control characters (newline, tab, NUL),
format characters (text direction, invisible ones), lone surrogates, line and paragraph separators."""
SHOWN = 60
"""How many characters of a value a message quotes."""


def strings(value: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, last part of the key and text of every string and dict key in a config, plan or JSON value."""
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


def control_character(text: str) -> str:
    """Return the first control or format character of a text; empty if it has none."""
    return next((letter for letter in text if unicodedata.category(letter) in CONTROL_CATEGORIES), "")


def hydra_value(text: str) -> str:
    """Return a text as a quoted value in the grammar of Hydra's overrides."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def quoted(text: str) -> str:
    """Return a text in quotes, on one line, cut to SHOWN characters."""
    return ascii(text) if len(text) <= SHOWN else f"{ascii(text[:SHOWN])}… ({len(text):,} characters)"


def short_commits(commits: str) -> str:
    """Return commits (git hashes, separated by commas) with 12 digits each; a changed work tree stays marked."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]+", r"\1", commits)


def nearest(name: str, known: Iterable[str], *, likeness: float = 0.5) -> str | None:
    """Return the known name that is most like a name, at least by a likeness of 0 to 1; None if there is none."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=likeness)), None)


def counted(number: int, unit: str) -> str:
    """Return a number with its unit, such as `1 rank` or `8 ranks`."""
    return f"{number:,} {unit}" if number == 1 else f"{number:,} {unit}s"


def with_verb(names: Sequence[str], one: str, several: str) -> str:
    """Return names and the form of a verb for their number: `pp is`, or `pp and sp are`."""
    return f"{' and '.join(names)} {one if len(names) == 1 else several}"


def with_article(name: str) -> str:
    """Return a name with a or an, as it is spoken: `an NVIDIA H100`, `an L4`, `a Tesla T4`."""
    letters = re.findall("[A-Za-z]*", name)[0]
    vowels = "AEFHILMNORSX" if letters.isupper() else "AEIOaeio"
    return f"{'an' if letters.startswith(tuple(vowels)) else 'a'} {name}"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as sorted ranges: `0, 4-7` for 0, 4, 5, 6, 7."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
