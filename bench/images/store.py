"""A folder of imported images: each file named by its content, beside it a record of what it is and where it came from.

pytorch-25.11-py3-sha256-0123456789ab.sqsh    the image, read-only; it gets this name last, when it is whole
pytorch-25.11-py3-sha256-0123456789ab.json    its record
pytorch-25.11-py3-sha256-0123456789ab.checked when its content was read last, and its digest then
.import-HOST-PID.part                         an import at work, or one that was killed
.import.lock                                  held by the import at work
"""

import dataclasses
import fcntl
import json
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import IO, Any

from bench.contract import atomic_files
from bench.contract.plan_paths import expanded
from bench.errors import ConfigError
from bench.images import digest, squashfs, tools
from bench.images.reference import SUFFIXES
from bench.masked_json import write
from bench.rules.finding import Finding, broken

VERSION = 1
"""Of the record."""
SHORT = 12
"""Digits of the digest in a file's name."""
IMPORTED = re.compile(rf"(.+)-sha256-([0-9a-f]{{{SHORT}}})\.sqsh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of an imported image."""

    version: int
    file: str
    source: str
    sha256: str
    size_bytes: int
    imported: str
    """When, in UTC (ISO 8601)."""
    importer: str
    """Enroot and its version, or copy."""
    architecture: str | None
    """Of a program in the image, as `uname -m` says it; None: none was found."""
    os_release: dict[str, str] | None
    marker: dict[str, Any] | None
    """Its /etc/runstop-image.json."""


def file_name(label: str, sha256: str) -> str:
    """Return what the image of this content is called; a digest that the label ends in already is not repeated."""
    label = re.sub(rf"-sha256-[0-9a-f]{{{SHORT}}}$", "", label)
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', label)}-sha256-{sha256[:SHORT]}.sqsh"


def record_path(image: Path) -> Path:
    """Return where an image's record lies."""
    return image.with_suffix(".json")


def recorded(image: Path) -> Record | None:
    """Return the record of an image's file, or None if there is no readable one; the image itself is not read."""
    path = record_path(image.resolve())
    try:
        fields = json.loads(path.read_text())
        return Record(**fields) if fields["version"] == VERSION else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save(image: Path, record: Record) -> None:
    """Write the record of an image."""
    write(record_path(image), dataclasses.asdict(record))


def faults(image: Path, *, architecture: str | None = None, whole: bool = True) -> list[Finding]:
    """Return all that is wrong with an image's file; architecture is what the nodes are, None: not judged.

    Without `whole` only name, record, superblock and length are looked at, not all of the content.
    """
    image = image.resolve()
    record = recorded(image)
    named = IMPORTED.fullmatch(image.name)
    found = _damage(image, whole=whole)
    if named is None or record is None:
        missing = (
            "its name does not hold its digest" if named is None else "there is no record of it, or none that is one"
        )
        fix = f"python -m bench image import {quote(str(image))}"
        unnamed = broken("ENR-11", missing, str(image), fix=fix, severity="warning")
        return [*found, unnamed, *_wrong_cpu(image, architecture, damaged=bool(found))]
    if record.file != image.name or not record.sha256.startswith(named[2]):
        what, fix = f"its record is of another file, {record.file}", "restore the record, or import it again"
        found.append(broken("ENR-11", what, str(image), fix=fix, severity="warning"))
    if whole and not found:
        found += _changed(image, record, atomic_files.sha256(image))
    elif image.stat().st_size != record.size_bytes:
        what = f"it has {image.stat().st_size:,} bytes, and had {record.size_bytes:,} when it was imported"
        found.append(_again(image, what))
    return found + _wrong_cpu(image, architecture, damaged=bool(found), known=record.architecture)


def faults_since_change(image: Path) -> list[Finding]:
    """Return what is wrong with an image's file; its content is read only if the file has changed since it last was."""
    image = image.resolve()
    found, record = faults(image, whole=False), recorded(image)
    if record is None or any(finding.rule == "ENR-08" for finding in found):
        return found
    return [*found, *_changed(image, record, digest.since_change(image))]


def _damage(image: Path, *, whole: bool) -> list[Finding]:
    what = squashfs.damage(image) if whole else squashfs.quick_damage(image)
    return [_again(image, what)] if what else []


def _changed(image: Path, record: Record, digest: str) -> list[Finding]:
    what = f"its content is sha256 {digest}, and was {record.sha256}"
    return [] if digest == record.sha256 else [_again(image, what)]


def misnamed(image: Path, digest: str) -> str | None:
    """Return how a file's content differs from what its name or its record says of it, or None."""
    named, record = IMPORTED.fullmatch(image.name), recorded(image)
    known = record.sha256 if record and record.file == image.name else named[2] if named else digest
    if digest.startswith(known):
        return None
    return f"its content is sha256 {digest}, and was {known} when it got its name"


def _again(image: Path, what: str) -> Finding:
    return broken("ENR-08", what, str(image), fix="delete it and its record, and import it again")


def _wrong_cpu(image: Path, wanted: str | None, *, damaged: bool, known: str | None = None) -> list[Finding]:
    if wanted is None or (damaged and known is None):
        return []
    made_for = known or squashfs.contents(image).architecture
    if made_for in (None, wanted):
        return []
    what = f"it is made for {made_for}, and the nodes are {wanted}"
    return [broken("ENR-07", what, str(image), fix=f"import it with --arch {wanted}")]


def verify(image: Path, *, architecture: str | None) -> tuple[Record | None, list[Finding]]:
    """Return an image's record and all that is wrong with its file.

    `architecture` is that of the nodes; None: that of this machine.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    tools.require("unsquashfs")
    if not image.is_file():
        raise ConfigError(
            "no such file", where=str(image), fix="`python -m bench image list` shows what is there", rule="ENR-07"
        )
    try:
        return recorded(image), faults(image, architecture=architecture or platform.machine())
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(image), fix="see that this user may"
        ) from error


def newest(folder: Path, source: str, *, architecture: str) -> Path | None:
    """Return the image that was imported last from a source, or None; whether it is whole is another question."""
    images = [path for path in folder.iterdir() if IMPORTED.fullmatch(path.name) and path.is_file()]
    records = [(record, path) for path in images if (record := recorded(path)) and record.source == source]
    fitting = [(record.imported, path) for record, path in records if record.architecture in (None, architecture)]
    return max(fitting)[1] if fitting else None


def make(folder: Path) -> None:
    """Make the folder if it is not there.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.strerror}", where=str(folder), fix="choose another --dir", rule="CFG-08") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("not writable", where=str(folder), fix="choose another --dir", rule="CFG-08")


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


LOCK = ".import.lock"


@contextmanager
def locked(folder: Path, *, say: Callable[[str], None]) -> Iterator[int]:
    """Let only one import into a folder run at a time; yields the lock's descriptor, which child processes may keep."""
    try:
        lock = _lock_file(folder)
    except OSError as error:
        raise ConfigError(
            f"{error.strerror}", where=str(folder / LOCK), fix="choose another --dir", rule="CFG-08"
        ) from error
    with lock:
        try:
            if not _lock(lock.fileno(), wait=False):
                say(f"waiting: another import into {folder} is at work")
                _lock(lock.fileno(), wait=True)
        except OSError as error:
            raise ConfigError(
                f"imports cannot be kept apart: {error.strerror}",
                where=str(folder / LOCK),
                fix="choose a folder on a file system with locks (Lustre: mounted with flock)",
            ) from error
        yield lock.fileno()


def _lock_file(folder: Path) -> IO[str]:
    """Return the lock's file; whoever may write to the folder may lock it."""
    path = folder / LOCK
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR))
        path.chmod(0o600 | folder.stat().st_mode & 0o066)
    return path.open("r+")


def is_locked(folder: Path) -> bool:
    """Return whether an import into the folder is at work."""
    with suppress(OSError), (folder / LOCK).open() as lock:
        return not _lock(lock.fileno(), wait=False, how=fcntl.LOCK_SH)
    return False


def _lock(descriptor: int, *, wait: bool, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how if wait else how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def identity(image: str) -> dict[str, Any]:
    """Return an image's name in the plan, its file as it lies there now, and the digest in its record.

    The digest is None where no record fits the file; for a registry reference there is only the name.
    """
    path = Path(expanded(image) or "")
    if not path.is_file():
        return {"name": image}
    record, file = recorded(path), path.resolve()
    fits = record is not None and (record.file, record.size_bytes) == (file.name, path.stat().st_size)
    digest = record.sha256 if record is not None and fits else None
    return {"name": image, "file": str(file), "sha256": digest, **_place(file)}


def is_unchanged(known: dict[str, Any]) -> bool | None:
    """Return whether an image's file is the one that `of` found; None where that cannot be known here.

    It is read only if its size, inode or time of change is another one.
    """
    path = Path(str(known.get("file") or ""))
    if not path.is_file() or "bytes" not in known:
        return None
    now = _place(path)
    if all(known.get(name) == value for name, value in now.items()):
        return True
    if known["bytes"] != now["bytes"]:
        return False
    return atomic_files.sha256(path) == str(known["sha256"]) if known.get("sha256") else None


def _place(path: Path) -> dict[str, int]:
    about = path.stat()
    return {"bytes": about.st_size, "inode": about.st_ino, "mtime_ns": about.st_mtime_ns}
