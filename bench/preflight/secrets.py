"""Look for secrets in what will be written down. What is found is named by its place, never shown."""

import re
from collections.abc import Iterator

from bench import masking as known_secrets
from bench.rules.check import Finding, Subject, broken
from bench.texts import strings

_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=(?![\s\"']*(?:\$|[\"']?(?:\s|$)))")
"""A value is given to a name; `NAME=$NAME` and `NAME=` only refer to it."""


def secrets(subject: Subject) -> Iterator[Finding]:
    """Yield each place of the plan, and each line of the script, that holds a secret."""
    seen = set[str]()
    for key, name, text in strings(subject.plan, "plan"):
        if text not in seen and (found := known_secrets.named(name, text) or known_secrets.first(text)):
            seen.add(text)
            yield broken("CFG-07", f"{found} stands in the plan", key.removeprefix("plan.config."))
    if seen:  # the script holds the plan
        return
    for number, found in _by_line(subject.script).items():
        yield broken("CFG-07", f"{found} stands in the job script", f"line {number}")
    for word in subject.arguments:
        if found := _assigned(word) or known_secrets.first(word):
            yield broken("CFG-07", f"{found} stands on sbatch's command line", known_secrets.masked(_option(word)))


def _by_line(script: str) -> dict[int, str]:
    """Return what secret stands in which line of a script, from 1."""
    lines = enumerate(script.split("\n"), 1)
    assigned = {number: found for number, line in lines if (found := _assigned(line))}
    shaped = {script.count("\n", 0, one.start) + 1: one.what for one in known_secrets.found(script)}
    return dict(sorted((shaped | assigned).items()))


def _option(word: str) -> str:
    """Return which option a word is, without its value; a word that is none may itself be the secret."""
    return word.partition("=")[0] if word.startswith("-") else "an argument"


def _assigned(line: str) -> str:
    """Return whose value stands in a line of a script, by the name that it is given to."""
    names = (name for name in _ASSIGNED.findall(line) if known_secrets.SECRET_NAME.search(name))
    return next((f"a value of {name}" for name in names), "")
