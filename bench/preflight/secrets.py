"""Find secrets in the plan, the script and the arguments. Messages have their place and kind, never their value."""

import re
from collections.abc import Iterator

from bench import masking as known_secrets
from bench.rules.check import Finding, Subject, broken
from bench.texts import strings

_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)=(?![\s\"']*(?:\$|[\"']?(?:\s|$)))")
"""An assignment of a value to a name; `NAME=$NAME` and `NAME=` contain no value."""


def secrets(subject: Subject) -> Iterator[Finding]:
    """Yield each key of the plan, line of the script and argument that contains a secret."""
    seen = set[str]()
    for key, name, text in strings(subject.plan, "plan"):
        if text not in seen and (secret := known_secrets.named(name, text) or known_secrets.first(text)):
            seen.add(text)
            yield broken("CFG-07", f"the plan contains {secret}, which is a secret", key.removeprefix("plan.config."))
    if seen:  # the script contains the plan
        return
    for number, secret in _by_line(subject.script).items():
        yield broken("CFG-07", f"the job script contains {secret}, which is a secret", f"line {number}")
    for argument in subject.arguments:
        if secret := _assigned(argument) or known_secrets.first(argument):
            yield broken(
                "CFG-07",
                f"the command line of sbatch contains {secret}, which is a secret",
                known_secrets.masked(_option(argument)),
            )


def _by_line(script: str) -> dict[int, str]:
    """Return the kind of secret by line number of a script, from 1."""
    lines = enumerate(script.split("\n"), 1)
    assigned = {number: secret for number, line in lines if (secret := _assigned(line))}
    shaped = {script.count("\n", 0, one.start) + 1: one.what for one in known_secrets.secrets_in(script)}
    return dict(sorted((shaped | assigned).items()))


def _option(argument: str) -> str:
    """Return the name of an option without its value; other arguments are not shown, they may be the secret."""
    return argument.partition("=")[0] if argument.startswith("-") else "an argument"


def _assigned(line: str) -> str:
    """Return the name of a secret variable to which a line assigns a value, or an empty string."""
    names = (name for name in _ASSIGNED.findall(line) if known_secrets.is_secret_name(name))
    return next((f"a value of {name}" for name in names), "")
