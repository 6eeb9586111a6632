"""Detect secrets in texts, by the formats of their issuers, by the names of variables, and by their values.

Every file that runstop writes passes through here. Files of its own are refused if they hold a secret (`refuse`); texts
from logs of other programs are written with the secrets masked (`masked`). A message shows only the first characters
of a secret.
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
"""Values of secret variables that are shorter (1, true) are not searched for: they are in every text."""
SHOWN = 4
"""Characters of a secret that a message shows, so that its owner can identify it."""
SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|(?:API|AUTH|ACCESS|SECRET|PRIVATE)?KEY)$", re.I
)
"""A name that ends so is that of a secret: HF_TOKEN is one, TOKENIZER_PATH and HF_TOKEN_FILE are not."""

_BEFORE = r"(?<![A-Za-z0-9])"
"""What may precede an issuer's prefix: no letter or digit, but _."""
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
"""Substrings, one of which is in each secret of a format: a text without them is not searched."""
_VALUE = re.compile(
    r"(?:token|secret|password|passwd|passphrase|credentials?|(?<=[A-Z_-])key)"
    r"\\?[\"']?\s{0,9}[:=]\s{0,9}\\?[\"']?((?![$*/~<])[^\s\"',;&${}()\[\]<>]{8,})",
    re.I,
)
"""An assignment to a name that may be that of a secret. References ($NAME), paths and asterisks do not match."""
_NAME = re.compile(
    r"(?:(?:[A-Z][A-Z0-9]*_)+(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|KEY)"
    r"|(?:(?i:password|passwd|passphrase|secret|(?:api|access|secret|private)[_-]?key"
    r"|(?:auth|access|api|bearer|bot|hf|hub|private|refresh|registry|session)[_-]?token)))\Z"
)
"""The end of a name whose value is a secret."""


class Secret(NamedTuple):
    """One secret in a text, without its value."""

    what: str
    start: int
    end: int
    has_prefix: bool
    """Whether it begins with the public prefix of its issuer."""

    def hint(self, text: str) -> str:
        """Return its length and, if it has one, its public prefix."""
        begins = f"{text[self.start : self.start + SHOWN]}…, " if self.has_prefix else ""
        return f"{begins}{self.end - self.start} characters"


def secrets_in(text: str) -> list[Secret]:
    """Return the secrets in a text, in order; overlapping ones are merged."""
    kept: list[Secret] = []
    for secret in sorted(_matches(text), key=lambda secret: (secret.start, -secret.end)):
        if not kept or secret.start >= kept[-1].end:
            kept.append(secret)
        elif secret.end > kept[-1].end:
            kept[-1] = kept[-1]._replace(end=secret.end)
    return kept


def first(text: str) -> str:
    """Return the kind of the first secret in a text, with a hint; empty if there is none."""
    return next((f"{secret.what} ({secret.hint(text)})" for secret in secrets_in(text)), "")


def named(name: str, text: str) -> str:
    """Return "a value of NAME" if the name is that of a secret; empty for references, which begin with $."""
    return f"a value of {name}" if SECRET_NAME.search(name) and text and not text.startswith("$") else ""


def masked(text: str) -> str:
    """Return a text in which each secret is replaced by a hint."""
    for secret in reversed(secrets_in(text)):
        text = f"{text[: secret.start]}[masked: {secret.hint(text)}]{text[secret.end :]}"
    return text


def masked_all(value: Any) -> Any:
    """Return a JSON value with every text in it masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {name: masked_all(item) for name, item in value.items()}
    return [masked_all(item) for item in value] if isinstance(value, list | tuple) else value


def refuse(texts: Iterable[str], *, where: str) -> None:
    """Raise ConfigError if one of the texts holds a secret, so that it is not written."""
    for text in texts:
        if secret := first(text):
            raise ConfigError(
                f"the file would contain a secret: {secret}",
                where=where,
                fix="revoke it; pass secrets by the name of an environment variable or file, never by value",
                rule="CFG-07",
            )


def _matches(text: str) -> Iterator[Secret]:
    if len(text) < SHORTEST:  # no format is shorter
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


def _secret_name(text: str, start: int) -> str:
    """Return the name that contains the position, if it is that of a secret; else an empty text."""
    around = re.compile(r"[A-Za-z]*").match(text, start)
    assert around is not None
    before = re.search(r"[A-Za-z0-9_-]{0,80}\Z", text[max(0, start - 80) : start])
    name = (before[0] if before else "") + around[0]
    secret = _NAME.search(name)
    return secret[0] if secret and (secret.start() == 0 or not name[secret.start() - 1].isalnum()) else ""


def _is_pair(text: str) -> bool:
    """Return whether a text is user:password in Base64, as in Docker's config.json."""
    try:
        user, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return False
    return bool(user and colon and password) and (user + password).isprintable()


def _known() -> dict[str, str]:
    """Return the secrets of this environment, by name, without paths."""
    values = {name: os.environ[name] for name in os.environ if _is_secret(name)}
    return {
        name: value for name, value in values.items() if len(value) >= SHORTEST and not value.startswith(("/", "~"))
    }


@cache
def _is_secret(name: str) -> bool:
    """Return whether a variable of this name holds a secret; cached, since every printed text needs it."""
    return SECRET_NAME.search(name) is not None
