"""How an image is named: by a registry, by a Docker or Podman daemon, or by a file. Text only, nothing is looked up."""

import re
from dataclasses import dataclass
from pathlib import Path

from bench.errors import ConfigError

HUB = "registry-1.docker.io"
"""Docker Hub, as Enroot and its credentials file call it."""
HUB_ALIASES = ("docker.io", "index.docker.io", HUB)
DAEMONS = ("dockerd", "podman")
SUFFIXES = (".sqsh", ".squashfs", ".sqfs")

_REGISTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(:\d+)?")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_IN_DAEMON = re.compile(r"[A-Za-z0-9][A-Za-z0-9/._:-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An image in a registry."""

    registry: str
    name: str
    tag: str | None = None
    digest: str | None = None
    user: str | None = None
    """Whose credentials Enroot takes; None: the first ones that its file has for the registry."""

    @property
    def source(self) -> str:
        """Name it in full, without the user."""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"docker://{self.registry}#{self.name}{tag}{digest}"

    @property
    def uri(self) -> str:
        """The URI in a form that every Enroot reads: a digest as a tag, because only 4.0 and later take it after @."""
        user = f"{self.user}@" if self.user else ""
        return f"docker://{user}{self.registry}#{self.name}:{self.digest or self.tag or 'latest'}"

    @property
    def label(self) -> str:
        """Return what the imported file's name begins with."""
        tag = self.tag or ("" if self.digest else "latest")
        return "-".join(filter(None, (self.name.rsplit("/", 1)[-1], tag)))


@dataclass(frozen=True, slots=True)
class InDaemon:
    """An image that a Docker or Podman of this machine has."""

    engine: str
    name: str

    @property
    def source(self) -> str:
        """Name it in full."""
        return f"{self.engine}://{self.name}"

    uri = source

    @property
    def program(self) -> str:
        """The program that talks to the daemon, which Enroot starts."""
        return {"dockerd": "docker"}.get(self.engine, self.engine)

    @property
    def label(self) -> str:
        """Return what the imported file's name begins with."""
        return self.name.rsplit("/", 1)[-1].replace(":", "-")


@dataclass(frozen=True, slots=True)
class Spelling:
    """A name that Pyxis reads otherwise than it is meant."""

    what: str
    corrected: str


def read(source: str) -> Reference | InDaemon | Path:
    """Return what SOURCE of an import names; a file is one that exists, or whose name looks like one.

    Raises:
        ConfigError: it names nothing, or holds a password.
    """
    scheme, _, rest = source.rpartition("://")
    if not scheme and (_looks_like_file(source) or Path(source).is_file()):
        return Path(source).expanduser()
    if scheme in DAEMONS and _IN_DAEMON.fullmatch(rest):
        return InDaemon(scheme, rest)
    reference = _in_registry(rest) if scheme in ("", "docker") else None
    if reference is None:
        raise ConfigError(
            f"{source!r} does not name an image",
            where="SOURCE",
            fix="write nvcr.io/nvidia/pytorch:TAG, docker://REGISTRY#IMAGE:TAG, dockerd://IMAGE:TAG or /PATH/FILE.sqsh",
            rule="ENR-10",
        )
    return reference


def misspelled(image: str) -> Spelling | None:
    """Return how container.image should be spelled for Pyxis to read it as it is meant; None: as it is (rule PYX-06).

    Pyxis takes for a file only what begins with . or /; Enroot before 4.0 knows a registry only by the # behind it.
    """
    if image.startswith(("/", ".")) or image.partition("://")[0] in DAEMONS:
        return None
    if _looks_like_file(image) or image.startswith("file://"):
        path = str(Path(image.removeprefix("file://")).expanduser())
        corrected = path if path.startswith(("/", ".")) else f"./{path}"
        return Spelling(f"{image} is read as the name of an image on Docker Hub, not as a file", corrected)
    bare = re.sub(r"^(https?|docker)://", "", image)
    scheme = "docker://" if image.startswith("docker://") else ""
    user, registry, name = _parts(bare)
    if registry is None:
        return None
    corrected = f"{scheme}{f'{user}@' if user else ''}{HUB if registry in HUB_ALIASES else registry}#{name}"
    if corrected == image:
        return None
    return Spelling(f"{registry} is read as a part of an image's name on Docker Hub, not as a registry", corrected)


def _looks_like_file(text: str) -> bool:
    return text.startswith(("/", ".", "~")) or (text.endswith(SUFFIXES) and "://" not in text)


def _in_registry(text: str) -> Reference | None:
    """Return [USER@][REGISTRY#]IMAGE[:TAG][@DIGEST], where the # may be a / as Docker has it; None: it is not that."""
    user, registry, rest = _parts(text)
    if user and ":" in user:
        raise ConfigError(
            "a password stands in the image's name",
            where="SOURCE",
            fix="revoke it, and write the new one to Enroot's .credentials file only",
            rule="CFG-07",
        )
    rest, _, digest = rest.partition("@")
    name, _, tag = rest.partition(":")
    registry = HUB if registry is None or registry in HUB_ALIASES else registry
    if registry == HUB and "/" not in name:
        name = f"library/{name}"
    parts = ((_REGISTRY, registry), (_NAME, name), (_TAG, tag or "latest"), (_DIGEST, digest or f"sha256:{'0' * 64}"))
    if not all(pattern.fullmatch(part) for pattern, part in parts):
        return None
    return Reference(registry=registry, name=name, tag=tag or None, digest=digest or None, user=user)


def _parts(text: str) -> tuple[str | None, str | None, str]:
    """Return user, registry, and the rest; a registry is known by # behind it, or by a dot or a port in it."""
    before, at, after = text.partition("@")
    user, text = (before, after) if at and not after.startswith("sha256:") else (None, text)
    if "#" in text:
        registry, _, rest = text.partition("#")
        return user, registry, rest
    first, slash, rest = text.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return user, first, rest
    return user, None, text
