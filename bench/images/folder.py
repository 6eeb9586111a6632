"""What lies in a folder of images: whole ones, foreign ones, and what is left of imports that were killed."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from bench.errors import ConfigError
from bench.images.lock import is_locked
from bench.images.reference import SUFFIXES
from bench.images.store import SHORT, Record, faults, recorded
from bench.rules.finding import Finding, broken

PART = ".import-*.part"
RECORD = re.compile(rf".+-sha256-[0-9a-f]{{{SHORT}}}\.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in the folder."""

    path: Path
    size_bytes: int
    record: Record | None
    faults: list[Finding]


def entries(folder: Path) -> list[Entry]:
    """Return the images of a folder by name, and what imports that were killed have left.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{error.strerror}", where=str(folder), fix="name the folder of images with --dir") from error
    orphans = [path for path in paths if RECORD.fullmatch(path.name) and path.with_suffix(".sqsh") not in paths]
    parts = [path for path in paths if path.match(PART)]
    images = [path for path in paths if path.suffix in SUFFIXES]
    found = [*map(_image, images), *(_part(path, folder) for path in parts), *map(_orphan, orphans)]
    return [entry for entry in found if entry is not None]


def _image(path: Path) -> Entry:
    if not path.is_file():
        return Entry(path, 0, None, [_damaged(path, "it is not a file, or a link to nothing")])
    try:
        return Entry(path, path.stat().st_size, recorded(path), faults(path, whole=False))
    except OSError as error:
        found = _damaged(path, f"cannot be read: {error.strerror}", fix="see that this user may read it")
        return Entry(path, 0, None, [found])


def _part(path: Path, folder: Path) -> Entry | None:
    """Return what an import writes; None: it was done in between."""
    with suppress(FileNotFoundError):
        size = path.stat().st_size
        if is_locked(folder):
            return Entry(path, size, None, [_damaged(path, "incomplete: an import is at work", fix="wait for it")])
        return Entry(path, size, None, [_damaged(path, "incomplete: its import was killed")])
    return None


def _orphan(path: Path) -> Entry:
    fix = f"import the image again, or rm {quote(str(path))}"
    found = broken("ENR-11", "a record without its image", str(path), fix=fix, severity="warning")
    return Entry(path, 0, recorded(path.with_suffix(".sqsh")), [found])


def _damaged(path: Path, what: str, *, fix: str | None = None) -> Finding:
    return broken("ENR-08", what, str(path), fix=fix or f"rm {quote(str(path))}")
