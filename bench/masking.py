"""Detect secrets in texts: by formats of issuers, names of variables, random characters, values of this environment.

Every file that runstop writes passes through here. Files of its own are refused if they hold a secret (`refuse`); texts
from logs of other programs are written with the secrets masked (`masked`). A message shows only the first characters
of a secret.
"""

import base64
import binascii
import itertools
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
_SECRET_WORDS = re.compile(
    r"(?:passwords?|passwd|passphrase|passcode)\Z"
    r"|(?:^|_)(?:client_?)?secret\Z|(?:^|_)jwt\Z|^bearer\Z"
    r"|_(?:auth|cookie|credentials?|creds|dsn|pat|pw|pwd)\Z|(?:bind|root|user)pw\Z"
    r"|(?:^|_)(?:admin|db|ftp|ldap|mail|mysql|pg|redis|root|smtp|ssh|sudo|user)_?pass\Z"
    r"|(?:^|_)(?:access|account|api|auth|encryption|private|secret|shared|signing)_?key\Z"
    r"|(?:^|_)(?:access|api|auth|bearer|bot|hf|hub|id|npm|private|refresh|registry|session)_?tokens?\Z"
    r"|(?:connection_string|webhook_url|auth_config)\Z"
    r"|(?:^|_)(?:database|db|mongo|mongodb|mysql|postgres|postgresql|rabbitmq|amqp|broker|redis)_ur[il]\Z"
)
"""Ends of names, in lower case, whose values are secrets wherever they are."""
_SECRET_VARIABLES = re.compile(
    r"(?:^|_)(?:credentials?|(?<!config_)key|(?<!eos_)(?<!bos_)(?<!pad_)(?<!unk_)token)\Z"
    r"|(?<!forward)(?<!backward)(?<!training)(?<!layer)_pass\Z"
)
"""Ends of further names that are secrets if a variable has them; in other texts they are words of models and data."""
_QUALIFIER = re.compile(r"v?\d+|b64|base64|current|dev|hex|new|old|pem|prev|prod|production|raw|staging|test|value")
"""Words after the name of a secret, as in HF_TOKEN_2: HF_TOKEN_FILE and TOKENIZER_PATH are names of no secrets."""

_BEFORE = r"(?<![A-Za-z0-9])"
"""What may precede an issuer's prefix: no letter or digit, but _."""
_SHAPES = {
    "a Hugging Face token": (_BEFORE + r"(hf_[A-Za-z0-9]{20,})", "hf_"),
    "an NVIDIA API key": (_BEFORE + r"(nvapi-[\w-]{20,})", "nvapi-"),
    "an AWS access key": (_BEFORE + r"(A(?:KIA|SIA)[0-9A-Z]{16})(?![A-Za-z0-9])", "AKIA", "ASIA"),
    "an AWS secret key": (
        r"(?i:aws_secret_access_key|secretaccesskey)\\?[\"']?\s*[:=]\s*\\?[\"']?([A-Za-z0-9/+=]{40})",
    ),
    "an Azure key": (r"(?i:account|sharedaccess)(?i:key)=([A-Za-z0-9/+]{40,}={0,2})", "ey=", "EY="),
    "a signature of Azure": (r"[?&]sig=([A-Za-z0-9%/+=]{20,})", "sig="),
    "a Databricks token": (_BEFORE + r"(dapi[0-9a-f]{32}(?:-\d+)?)(?![A-Za-z0-9])", "dapi"),
    "a DigitalOcean token": (_BEFORE + r"(do[opr]_v1_[0-9a-f]{32,})", "_v1_"),
    "a Docker token": (_BEFORE + r"(dckr_[a-z]{3}_[\w-]{20,})", "dckr_"),
    "a GitHub token": (
        _BEFORE + r"(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})",
        *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
    ),
    "a GitLab token": (_BEFORE + r"(gl(?:pat|rt|dt|cbt|ptt|ft|soat)-[\w-]{20,})", "gl"),
    "a Google API key": (_BEFORE + r"(AIza[\w-]{30,})", "AIza"),
    "a Google token": (_BEFORE + r"(ya29\.[\w-]{20,})", "ya29."),
    "a Google client secret": (_BEFORE + r"(GOCSPX-[\w-]{20,})", "GOCSPX-"),
    "a Grafana token": (_BEFORE + r"(gl(?:sa|c)_[\w+/=]{20,})", "glsa_", "glc_"),
    "an npm token": (_BEFORE + r"(npm_[A-Za-z0-9]{30,})", "npm_"),
    "a PyPI token": (_BEFORE + r"(pypi-AgE[\w-]{20,})", "pypi-"),
    "a SendGrid key": (_BEFORE + r"(SG\.[\w-]{16,}\.[\w-]{16,})", "SG."),
    "a Slack token": (_BEFORE + r"(xox[abeprs]-[\w-]{10,})", "xox"),
    "a Slack webhook": (r"hooks\.slack\.com/[a-z]+/([\w/]{20,})", "slack"),
    "a Stripe key": (_BEFORE + r"([rs]k_(?:live|test)_[A-Za-z0-9]{16,})", "k_live_", "k_test_"),
    "a Vault token": (_BEFORE + r"(hv[bsr]\.[\w-]{20,})", "hv"),
    "an API key": (_BEFORE + r"(sk-[\w-]{20,})", "sk-"),
    "a JSON web token": (_BEFORE + r"(eyJ[\w-]{10,1000}+\.eyJ[\w-]{10,}+\.[\w-]*)", "eyJ"),
    "a private key": (
        r"(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:(?!-----END )[\s\S])*(?:-----END [A-Z ]*-----)?)",
        "-----BEGIN ",
    ),
    "an age key": (_BEFORE + r"(AGE-SECRET-KEY-1[0-9A-Z]{50,})", "AGE-SECRET-KEY-"),
    "a password in an address": (r"\w://[^/\s:@$]{0,200}:([^/\s:@$]+)@[\w\[]", "://"),
    "an authorization": (
        r"(?i:authorization)\\?[\"']?\s{0,9}[:=]\s{0,9}\\?[\"']?[A-Za-z]{1,9}\s{1,9}((?![$*<{%\[])[^\s\"',;\\]{8,})",
        *("uthorization", "UTHORIZATION"),
    ),
    "a secret option": (
        r"--(?:[a-z]+-)?(?:password|passphrase|secret|token|api-?key)\s{1,9}[\"']?"
        r"((?![$*/~<\[-])(?=[^\s\"']*[^A-Z_\s\"'])(?=[^\s\"']*[^a-z\s\"'])[^\s\"']{8,})",
        "--",
    ),
    "a registry's credentials": (r"(?i:\bauth)\\?[\"']?\s*[:=]\s*\\?[\"']?([A-Za-z0-9+/]{8,}={0,2})",),
}
"""By kind of secret: its pattern, and substrings, one of which is in each secret of the kind."""
_VALUE = re.compile(
    r"((?:auth|bearer|config|cookie|cred|dsn|jwt|key|pass|pat|pwd?|secret|string|token|ur[il])[a-z0-9]{0,9}"
    r"(?:[_-][a-z0-9]{1,10}){0,2}+)\\?[\"']?(?:\s{0,9}:\s{0,9}|\s{1,9}=\s{0,9}|=)"
    r"(?=\\?[\"']((?![$*/~<\[])[^\"'\\\n$]{8,200})\\?[\"']|\\?[\"']?((?![$*/~<]|YOUR_|\w+=)[^\s\"',;&${}()\[\]<>]{8,}))",
    re.I,
)
"""The end of a name that may be that of a secret, and the assigned value. References ($NAME), paths and asterisks do
not match."""
_UNNAMED = re.compile(
    r"-----BEGIN (?![A-Z ]*PRIVATE)[A-Z ]+-----(?:\s*[A-Za-z0-9+/=]{20,})*"
    r"|(?<![A-Za-z0-9+/_.~$=@-])(?<!SHA256:)(?<!base64,)(?!_Z|AAAA|sha\d+-)"
    r"([A-Za-z0-9+_-][A-Za-z0-9+/_-]{19,127})(?!\.?[A-Za-z0-9+/_-])"
)
"""Characters that may be a key without a name; not in certificates, public keys, digests, paths and C++ symbols."""
_LONG = re.compile(r"[A-Za-z0-9]{20,}")
_WORDS = re.compile(r"[A-Z]?[a-z]{3,}|[A-Z][a-z]{2}|[A-Z]{4,}|\d{3,}")
"""Parts of a name: words and numbers."""


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


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name, in upper or lower case, holds a secret: HF_TOKEN does."""
    return _is_secret(name.upper())


def named(name: str, text: str) -> str:
    """Return "a value of NAME" if the name is that of a secret; empty for references, which begin with $."""
    return f"a value of {name}" if text and not text.startswith("$") and is_secret_name(name) else ""


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
                fix="revoke the secret, and write the name of an environment variable or file instead of the secret",
                rule="CFG-07",
            )


def _matches(text: str) -> Iterator[Secret]:
    if len(text) < SHORTEST:  # no format is shorter
        return
    for what, (shape, *parts) in _SHAPES.items():
        if parts and not any(part in text for part in parts):
            continue
        for match in re.finditer(shape, text):
            if what != "a registry's credentials" or _is_pair(match[1]):
                yield Secret(what, *match.span(1), has_prefix=shape.startswith(_BEFORE))
    for match in _VALUE.finditer(text):
        before = re.search(r"[A-Za-z0-9_-]{0,80}\Z", text[max(0, match.start() - 80) : match.start()])
        name = (before[0] if before else "") + match[1]
        if _is_secret(name):
            yield Secret(f"a value of {name}", *match.span(2 if match[2] else 3), has_prefix=False)
    for match in _UNNAMED.finditer(text):
        if match[1] and any(_is_random(part) for part in _LONG.findall(match[1])) and not _is_text(match[1]):
            yield Secret("a random key", *match.span(1), has_prefix=False)
    for name, value in _known().items():
        for match in re.finditer(re.escape(value), text):
            yield Secret(f"the value of {name}", *match.span(), has_prefix=False)


def _is_random(text: str) -> bool:
    """Return whether letters and digits are mixed as in a random key: upper case, lower case and digits, no words.

    Digests and UUIDs have no upper case or no lower case. Of random keys of 20, 32 and 40 letters and digits, 78, 88
    and 90 % are found.
    """
    kinds = [0 if letter.isdigit() else 1 if letter.islower() else 2 for letter in text]
    changes = sum(one != other for one, other in itertools.pairwise(kinds))
    in_words = sum(len(part) for part in _WORDS.findall(text))
    is_mixed = min(kinds.count(kind) for kind in range(3)) >= 2 and changes >= 0.4 * (len(text) - 1)
    return is_mixed and in_words <= 0.55 * len(text) and len(set(text)) >= 12


def _is_text(text: str) -> bool:
    """Return whether a text is printable text in Base64."""
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True).decode().isprintable()
    except (binascii.Error, UnicodeDecodeError):
        return False


def _is_pair(text: str) -> bool:
    """Return whether a text is user:password in Base64, as in Docker's config.json."""
    try:
        user, colon, password = base64.b64decode(text, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return False
    return bool(user and colon and password) and (user + password).isprintable()


def _known() -> dict[str, str]:
    """Return the secrets of this environment, by name, without paths."""
    values = {name: os.environ[name] for name in os.environ if is_secret_name(name)}
    return {
        name: value for name, value in values.items() if len(value) >= SHORTEST and not value.startswith(("/", "~"))
    }


@cache
def _is_secret(name: str) -> bool:
    """Return whether a name is that of a secret, of a variable if it is in upper case; cached: every text needs it."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower().strip("_").split("_")
    while words[1:] and _QUALIFIER.fullmatch(words[-1]):
        del words[-1]
    end = "_".join(words)
    is_variable = name == name.upper()
    return bool(_SECRET_WORDS.search(end) or (is_variable and _SECRET_VARIABLES.search(end)))
