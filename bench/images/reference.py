"""Parse image names: images in a registry, in a Docker or Podman daemon, or in a file. Nothing is looked up."""

import re
from dataclasses import dataclass
from pathlib import Path

from bench.errors import ConfigError

HUB = "registry-1.docker.io"
"""Docker Hub's name in Enroot and its credentials file."""
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
    """The user whose credentials Enroot uses; None: the first entry for the registry in its file."""

    @property
    def source(self) -> str:
        """The full name, without the user."""
        tag = f":{self.tag}" if self.tag else ""
        digest = f"@{self.digest}" if self.digest else ""
        return f"docker://{self.registry}#{self.name}{tag}{digest}"

    @property
    def uri(self) -> str:
        """The URI for all versions of Enroot: the digest is written as a tag, since only 4.0 and later accept @."""
        user = f"{self.user}@" if self.user else ""
        return f"docker://{user}{self.registry}#{self.name}:{self.digest or self.tag or 'latest'}"

    @property
    def label(self) -> str:
        """The first part of the imported file's name."""
        tag = self.tag or ("" if self.digest else "latest")
        return "-".join(filter(None, (self.name.rsplit("/", 1)[-1], tag)))


@dataclass(frozen=True, slots=True)
class InDaemon:
    """An image in this machine's Docker or Podman daemon."""

    engine: str
    name: str

    @property
    def source(self) -> str:
        """The full name."""
        return f"{self.engine}://{self.name}"

    uri = source

    @property
    def program(self) -> str:
        """The daemon's command-line program, which Enroot starts."""
        return {"dockerd": "docker"}.get(self.engine, self.engine)

    @property
    def label(self) -> str:
        """The first part of the imported file's name."""
        return self.name.rsplit("/", 1)[-1].replace(":", "-")


@dataclass(frozen=True, slots=True)
class Spelling:
    """An image name that Pyxis would misread, and its correction."""

    what: str
    corrected: str


def read(source: str) -> Reference | InDaemon | Path:
    """Parse the SOURCE of an import; it is a file if that file exists or the name looks like a path.

    Raises:
        ConfigError: it is not a valid image name, or contains a password.
    """
    scheme, _, rest = source.rpartition("://")
    if not scheme and (_looks_like_file(source) or Path(source).is_file()):
        return Path(source).expanduser()
    if scheme in DAEMONS and _IN_DAEMON.fullmatch(rest):
        return InDaemon(scheme, rest)
    reference = _in_registry(rest) if scheme in ("", "docker") else None
    if reference is None:
        raise ConfigError(
            f"{source!r} is not a valid image name",
            where="SOURCE",
            fix="write nvcr.io/nvidia/pytorch:TAG, docker://REGISTRY#IMAGE:TAG, dockerd://IMAGE:TAG or /PATH/FILE.sqsh",
            rule="ENR-10",
        )
    return reference


def misspelled(image: str) -> Spelling | None:
    """Return the spelling of container.image that Pyxis reads correctly; None if it is correct already (rule PYX-06).

    Pyxis reads a name as a file only if it begins with . or /. Enroot before 4.0 needs # after the registry.
    """
    if image.startswith(("/", ".")) or image.partition("://")[0] in DAEMONS:
        return None
    if _looks_like_file(image) or image.startswith("file://"):
        path = str(Path(image.removeprefix("file://")).expanduser())
        corrected = path if path.startswith(("/", ".")) else f"./{path}"
        return Spelling(f"Pyxis reads {image} as an image on Docker Hub, not as a file", corrected)
    bare = re.sub(r"^(https?|docker)://", "", image)
    scheme = "docker://" if image.startswith("docker://") else ""
    user, registry, name = _parts(bare)
    if registry is None:
        return None
    corrected = f"{scheme}{f'{user}@' if user else ''}{HUB if registry in HUB_ALIASES else registry}#{name}"
    if corrected == image:
        return None
    return Spelling(f"Pyxis reads {registry} as part of an image name on Docker Hub, not as a registry", corrected)


def _looks_like_file(text: str) -> bool:
    return text.startswith(("/", ".", "~")) or (text.endswith(SUFFIXES) and "://" not in text)


def _in_registry(text: str) -> Reference | None:
    """Parse [USER@][REGISTRY#]IMAGE[:TAG][@DIGEST], with # or, as in Docker, /; None if it does not match."""
    user, registry, rest = _parts(text)
    if user and ":" in user:
        raise ConfigError(
            "the image name contains a password",
            where="SOURCE",
            fix="revoke the password, and put the new one into Enroot's .credentials file only",
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
    """Return user, registry and the rest; a registry is followed by #, or contains a dot or a port."""
    before, at, after = text.partition("@")
    user, text = (before, after) if at and not after.startswith("sha256:") else (None, text)
    if "#" in text:
        registry, _, rest = text.partition("#")
        return user, registry, rest
    first, slash, rest = text.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return user, first, rest
    return user, None, text
