"""Look for secrets in what will be written down. What is found is named by its place, never shown."""

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

from bench.rules.check import Finding, Subject, broken

_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?:API|AUTH|ACCESS|SECRET|PRIVATE)?KEY)$", re.I
)
"""The last word of a name tells: TOKENIZER_PATH and HF_TOKEN_FILE hold no secret."""
_SHAPES = {
    "a Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "an NVIDIA API key": r"\bnvapi-[\w-]{20,}",
    "an AWS access key": r"\bA(?:KIA|SIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_\w{40,}",
    "a GitLab token": r"\bglpat-[\w-]{20,}",
    "a Slack token": r"\bxox[abprs]-[\w-]{10,}",
    "an API key": r"\bsk-[\w-]{20,}",
    "a JSON web token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "a password in an address": r"\w://[^/\s:@$]+:[^/\s:@$]+@\w",
}
_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=(?![\s\"']*(?:\$|[\"']?(?:\s|$)))")
"""A value is given to a name; `NAME=$NAME` and `NAME=` only refer to it."""
SHORTEST = 8
"""Shorter values of secret variables (1, true) stand everywhere."""


def secrets(subject: Subject) -> Iterator[Finding]:
    """Yield each place of the plan, and each line of the script, that holds a secret."""
    known, seen = _values(), set[str]()
    for key, name, text in strings(subject.plan, "plan"):
        if text not in seen and (found := _named(name, text) or _shape(text) or _known(text, known)):
            seen.add(text)
            yield broken("CFG-07", f"{found} stands in the plan", key.removeprefix("plan.config."))
    if seen:  # the script holds the plan
        return
    for number, line in enumerate(subject.script.splitlines(), 1):
        assigned = next((name for name in _ASSIGNED.findall(line) if _SECRET_NAME.search(name)), None)
        if found := (assigned and f"a value of {assigned}") or _shape(line) or _known(line, known):
            yield broken("CFG-07", f"{found} stands in the job script", f"line {number}")
    for word in subject.arguments:
        if found := _shape(word) or _known(word, known):
            yield broken("CFG-07", f"{found} stands on sbatch's command line", word.partition("=")[0])


def strings(value: Any, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield place, last name and text of every string in a plan."""
    if isinstance(value, str):
        yield key, key.rpartition(".")[2], value
    elif dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from strings(getattr(value, item.name), f"{key}.{item.name}")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from strings(item, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from strings(item, f"{key}[{number}]")


def _named(name: str, text: str) -> str:
    """Return whose secret a value is by its name; what begins with $ is only a reference."""
    return f"a value of {name}" if _SECRET_NAME.search(name) and text and not text.startswith("$") else ""


def _shape(text: str) -> str:
    return next((what for what, shape in _SHAPES.items() if re.search(shape, text)), "")


def _known(text: str, values: dict[str, str]) -> str:
    return next((f"the value of {name}" for name, value in values.items() if value in text), "")


def _values() -> dict[str, str]:
    """Return the secrets of this environment, by name."""
    return {name: value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= SHORTEST}
