"""What a file holds: its size and its SHA-256. Standard library only: ranks use it."""

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a file holds."""

    bytes: int
    sha256: str


def of(path: Path) -> Content:
    """Return what a file holds."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Content(bytes=file.tell(), sha256=digest)


def sha256(path: Path) -> str:
    """Return the SHA-256 of what a file holds, in hexadecimal."""
    return of(path).sha256
