"""Golden files: the whole output of a command or a function, which a test compares with today's."""

import os
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def significant(value: Any) -> Any:
    """Return a value with floats of seven digits.

    Long lists are their length, first and last item; those of numbers also their sum.
    """
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {name: significant(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        short = list(value)
        if len(value) > 8:
            are_numbers = all(isinstance(each, int | float) for each in value)
            short = [len(value), value[0], value[-1], *([sum(value)] if are_numbers else [])]
        return [significant(each) for each in short]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def require(text: str, file: Path, *, variable: str) -> None:
    """Compare a text with a file, line by line; the environment variable writes the file first."""
    if os.environ.get(variable):
        file.write_text(text)
    assert text.split("\n") == file.read_text().split("\n"), f"if this is right, run with {variable}=1 and commit"
