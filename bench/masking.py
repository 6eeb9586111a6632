"""Secrets in texts: found by the shapes that their issuers give them, by the names that they have, and by value.

Everything that is written down for others passes here. What is ours to write is refused (`refuse`); what logs of other
programs say is written with the secrets masked (`masked`). No message shows one: its first characters say which it is.
"""

import base64
import binascii
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from bench.errors import ConfigError

SHORTEST = 8
"""Shorter values of secret variables (1, true) stand everywhere."""
SHOWN = 4
"""Characters of a secret that a message shows, so that its owner knows which one to revoke."""
SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?:API|AUTH|ACCESS|SECRET|PRIVATE)?KEY)$", re.I
)
"""The last word of a name tells: TOKENIZER_PATH and HF_TOKEN_FILE hold no secret."""

_BEFORE = r"(?<![A-Za-z0-9])"
"""In front of what an issuer's prefix begins; _ may stand there."""
_SHAPES = {
    "a Hugging Face token": _BEFORE + r"(hf_[A-Za-z0-9]{20,})",
    "an NVIDIA API key": _BEFORE + r"(nvapi-[\w-]{20,})",
    "an AWS access key": _BEFORE + r"(A(?:KIA|SIA)[0-9A-Z]{16})(?![A-Za-z0-9])",
    "an AWS secret key": r"(?i:aws_secret_access_key|secretaccesskey)\\?[\"']?\s*[:=]\s*\\?[\"']?([A-Za-z0-9/+=]{40})",
    "a GitHub token": _BEFORE + r"(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
    "a GitLab token": _BEFORE + r"(glpat-[\w-]{20,})",
    "a Docker token": _BEFORE + r"(dckr_pat_[\w-]{20,})",
    "a Slack token": _BEFORE + r"(xox[abeprs]-[\w-]{10,})",
    "an API key": _BEFORE + r"(sk-[\w-]{20,})",
    "a JSON web token": _BEFORE + r"(eyJ[\w-]{10,1000}+\.eyJ[\w-]{10,}+\.[\w-]*)",
    "a private key": r"(-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----END )[\s\S])*(?:-----END [A-Z ]*-----)?)",
    "a password in an address": r"\w://[^/\s:@$]{0,200}:([^/\s:@$]+)@[\w\[]",
    "a registry's credentials": r"(?i:\bauth)\\?[\"']?\s*[:=]\s*\\?[\"']?([A-Za-z0-9+/]{8,}={0,2})",
}
_LETTERS = {
    "a Hugging Face token": ("hf_",),
    "an NVIDIA API key": ("nvapi-",),
    "an AWS access key": ("AKIA", "ASIA"),
    "a GitHub token": ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    "a GitLab token": ("glpat-",),
    "a Docker token": ("dckr_pat_",),
    "a Slack token": ("xox",),
    "an API key": ("sk-",),
    "a JSON web token": ("eyJ",),
    "a private key": ("-----BEGIN ",),
    "a password in an address": ("://",),
}
"""Letters of which each secret of a shape holds some: texts without them, as most are, need not be searched."""
_VALUE = re.compile(
    r"(?:token|secret|password|passwd|passphrase|credentials?|(?<=[A-Z_-])key)"
    r"\\?[\"']?\s{0,9}[:=]\s{0,9}\\?[\"']?((?![$*/~<])[^\s\"',;&${}()\[\]<>]{8,})",
    re.I,
)
"""A value is given to a name that may say what it is. A reference ($NAME), a path and asterisks are no value."""
_NAME = re.compile(
    r"(?:(?:[A-Z][A-Z0-9]*_)+(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|KEY)"
    r"|(?:(?i:password|passwd|passphrase|secret|(?:api|access|secret|private)[_-]?key"
    r"|(?:auth|access|api|bearer|bot|hf|hub|private|refresh|registry|session)[_-]?token)))\Z"
)
"""The end of a name that says that its value is a secret."""


class Secret(NamedTuple):
    """One secret in a text, without its value."""

    what: str
    start: int
    end: int
    has_prefix: bool
    """Whether it begins with its issuer's letters, which are no secret."""

    def hint(self, text: str) -> str:
        """Return what may be shown of it: its length and, where that is its issuer's, how it begins."""
        begins = f"{text[self.start : self.start + SHOWN]}…, " if self.has_prefix else ""
        return f"{begins}{self.end - self.start} characters"


def found(text: str) -> list[Secret]:
    """Return the secrets in a text, in their order; of those that overlap the first one."""
    kept: list[Secret] = []
    for secret in sorted(_found(text), key=lambda secret: (secret.start, -secret.end)):
        if not kept or secret.start >= kept[-1].end:
            kept.append(secret)
        elif secret.end > kept[-1].end:
            kept[-1] = kept[-1]._replace(end=secret.end)
    return kept


def first(text: str) -> str:
    """Return what the first secret in a text is, with a hint at which one, or nothing."""
    return next((f"{secret.what} ({secret.hint(text)})" for secret in found(text)), "")


def named(name: str, text: str) -> str:
    """Return whose secret a value is by its name alone; what begins with $ is only a reference."""
    return f"a value of {name}" if SECRET_NAME.search(name) and text and not text.startswith("$") else ""


def masked(text: str) -> str:
    """Return a text in which each secret is replaced by a hint."""
    for secret in reversed(found(text)):
        text = f"{text[: secret.start]}[masked: {secret.hint(text)}]{text[secret.end :]}"
    return text


def masked_all(value: Any) -> Any:
    """Return what JSON holds with every text in it masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {name: masked_all(item) for name, item in value.items()}
    return [masked_all(item) for item in value] if isinstance(value, list | tuple) else value


def refuse(texts: Iterable[str], *, where: str) -> None:
    """Raise ConfigError if one of the texts holds a secret, which then is not written down."""
    for text in texts:
        if secret := first(text):
            raise ConfigError(
                f"{secret} would be written down",
                where=where,
                fix="revoke it; pass secrets by the name of an environment variable or file, never by value",
                rule="CFG-07",
            )


def _found(text: str) -> Iterator[Secret]:
    if len(text) < SHORTEST:  # as most cells of a table; no shape is shorter either
        return
    for what, shape in _SHAPES.items():
        if what in _LETTERS and not any(letters in text for letters in _LETTERS[what]):
            continue
        for match in re.finditer(shape, text):
            if what != "a registry's credentials" or _is_pair(match[1]):
                yield Secret(what, *match.span(1), has_prefix=shape.startswith(_BEFORE))
    for match in _VALUE.finditer(text):
        if name := _secret_name(text, match.start()):
            yield Secret(f"a value of {name}", *match.span(1), has_prefix=False)
    for name, value in _known().items():
        for match in re.finditer(re.escape(value), text):
            yield Secret(f"the value of {name}", *match.span(), has_prefix=False)


def _secret_name(text: str, last_word: int) -> str:
    """Return the name whose last word begins there, if it is a secret's, or nothing."""
    around = re.compile(r"[A-Za-z]*").match(text, last_word)
    assert around is not None
    before = re.search(r"[A-Za-z0-9_-]{0,80}\Z", text[max(0, last_word - 80) : last_word])
    name = (before[0] if before else "") + around[0]
    secret = _NAME.search(name)
    return secret[0] if secret and (secret.start() == 0 or not name[secret.start() - 1].isalnum()) else ""


def _is_pair(text: str) -> bool:
    """Return whether a text is user:password in Base64, as Docker keeps it."""
    try:
        user, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return False
    return bool(user and colon and password) and (user + password).isprintable()


def _known() -> dict[str, str]:
    """Return the secrets of this environment, by name; a path only leads to one."""
    values = {name: os.environ[name] for name in os.environ if _is_secret(name)}
    return {
        name: value for name, value in values.items() if len(value) >= SHORTEST and not value.startswith(("/", "~"))
    }


@cache
def _is_secret(name: str) -> bool:
    """Return whether the variable of this name holds a secret; asked for every text that is printed."""
    return SECRET_NAME.search(name) is not None
