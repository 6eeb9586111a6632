"""Read the prompts of a generation task: the question of its config, or a file of one JSON object a line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contract.generation import Generation
from bench.errors import ConfigError

KEYS = ("prompt", "length")
MOST_ANSWERS = 10_000
MOST_BYTES = 4 * 2**20
"""Of all prompts together: the plan holds them, and a batch script holds the plan."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One answer that is asked for."""

    prompt: str | None
    """None: random tokens."""
    length: int


def wanted(generation: Generation, *, has_text: bool) -> list[Wanted]:
    """Return what is asked for, in its order; without text, prompts are random.

    Raises:
        ConfigError: the file of prompts cannot be read, or one of its lines is no prompt.
    """
    if generation.prompts is None:
        return [Wanted(generation.question if has_text else None, length) for length in generation.lengths]
    found: list[Wanted] = []
    for number, line in enumerate(_lines(Path(generation.prompts)), start=1):
        prompt, length = _parsed(line, f"{generation.prompts}, line {number}")
        usual = generation.lengths[len(found) % len(generation.lengths)]
        found.append(Wanted(prompt if has_text else None, usual if length is None else length))
    if not found:
        raise ConfigError("no prompt in this file", where=generation.prompts, fix=_fix())
    return found


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines that are not blank."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(
                f"{path.stat().st_size:,} bytes of prompts, and a plan holds {MOST_BYTES:,} of them",
                where=str(path),
                fix="ask for less: a sample of the prompts, or shorter ones",
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        what = f"no prompts can be read: {error.strerror}"
        raise ConfigError(what, where=str(path), fix="correct task.generation.prompts") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason}", where=str(path), fix=_fix()) from error
    yield from (line for line in text.split("\n") if line.strip())


def _parsed(line: str, where: str) -> tuple[str, int | None]:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}", where=where, fix=_fix()) from error
    if not isinstance(record, dict) or set(record) - set(KEYS):
        keys = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"not an object of prompt and length, but {keys:.100}", where=where, fix=_fix())
    prompt, length = record.get("prompt"), record.get("length")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"the prompt is {prompt!r:.100}", where=where, fix=_fix())
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # JSON can write one half of a character, as \ud800
        what = f"the prompt holds {prompt[error.start]!a}, which is no character"
        raise ConfigError(what, where=where, fix=_fix()) from error
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"the length is {length!r:.100}, not a number of tokens", where=where, fix=_fix())
    return prompt, length


def _fix() -> str:
    return 'write one object a line, such as {"prompt": "Why is the sky blue?", "length": 200}; length may be left out'
