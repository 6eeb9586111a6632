"""A folder of imported images. Each file name contains the digest; a record next to it has the source and checksum.

pytorch-25.11-py3-sha256-0123456789ab.sqsh    the image, read-only; it gets this name when it is complete
pytorch-25.11-py3-sha256-0123456789ab.json    its record
pytorch-25.11-py3-sha256-0123456789ab.checked its digest, and the state of the file when the digest was computed
.import-HOST-PID.part                         the partial file of a running or killed import
.import.lock                                  the lock of the running import
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
"""The version of the record's format."""
DIGEST_DIGITS = 12
"""Hexadecimal digits of the digest in a file name."""
IMPORTED = re.compile(rf"(.+)-sha256-([0-9a-f]{{{DIGEST_DIGITS}}})\.sqsh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The record of an imported image."""

    version: int
    file: str
    source: str
    sha256: str
    size_bytes: int
    imported: str
    """The time of the import in UTC (ISO 8601)."""
    importer: str
    """Enroot and its version, or copy."""
    architecture: str | None
    """The architecture of a program in the image, as `uname -m` prints it; None if the image has no known program."""
    os_release: dict[str, str] | None
    marker: dict[str, Any] | None
    """The content of /etc/runstop-image.json in the image."""


def file_name(label: str, sha256: str) -> str:
    """Return the file name of an image: label and digest; a digest at the end of the label is not repeated."""
    label = re.sub(rf"-sha256-[0-9a-f]{{{DIGEST_DIGITS}}}$", "", label)
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', label)}-sha256-{sha256[:DIGEST_DIGITS]}.sqsh"


def record_path(image: Path) -> Path:
    return image.with_suffix(".json")


def recorded(image: Path) -> Record | None:
    """Return the record of an image file, or None if there is no readable one; the image itself is not read."""
    path = record_path(image.resolve())
    try:
        fields = json.loads(path.read_text())
        return Record(**fields) if fields["version"] == VERSION else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save(image: Path, record: Record) -> None:
    write(record_path(image), dataclasses.asdict(record))


def faults(image: Path, *, architecture: str | None = None, whole: bool = True) -> list[Finding]:
    """Return all problems of an image file; `architecture` is that of the nodes, None skips this check.

    Without `whole` only name, record, superblock and length are checked, not the content.
    """
    image = image.resolve()
    record = recorded(image)
    named = IMPORTED.fullmatch(image.name)
    problems = _damage(image, whole=whole)
    if named is None or record is None:
        missing = "the file name contains no SHA-256"
        if named is not None:
            missing = "the record of this image (a .json file) is missing, or cannot be read"
        fix = "import the image again"
        if not problems:
            fix = f"to add the SHA-256 and the record: runstop image import {quote(str(image))}"
        unnamed = broken("ENR-11", missing, str(image), fix=fix, severity="warning")
        return [*problems, unnamed, *_wrong_cpu(image, architecture, damaged=bool(problems))]
    if record.file != image.name or not record.sha256.startswith(named[2]):
        what = f"the record next to this image (a .json file) belongs to another file: {record.file}"
        fix = "restore the record, or import the image again"
        problems.append(broken("ENR-11", what, str(image), fix=fix, severity="warning"))
    if whole and not problems:
        problems += _changed(image, record, atomic_files.sha256(image))
    elif image.stat().st_size != record.size_bytes:
        what = f"the file has {image.stat().st_size:,} bytes, but had {record.size_bytes:,} when it was imported"
        problems.append(_damaged_import(image, what))
    return problems + _wrong_cpu(image, architecture, damaged=bool(problems), known=record.architecture)


def faults_since_change(image: Path) -> list[Finding]:
    """Return the problems of an image file; its content is read only if the file has changed since the last check."""
    image = image.resolve()
    problems, record = faults(image, whole=False), recorded(image)
    if record is None or any(finding.rule == "ENR-08" for finding in problems):
        return problems
    return [*problems, *_changed(image, record, digest.since_change(image))]


def _damage(image: Path, *, whole: bool) -> list[Finding]:
    what = squashfs.damage(image) if whole else squashfs.quick_damage(image)
    return [_damaged_import(image, what)] if what else []


def _changed(image: Path, record: Record, digest: str) -> list[Finding]:
    what = f"the file was changed: its SHA-256 is {digest}, but was {record.sha256}"
    return [] if digest == record.sha256 else [_damaged_import(image, what)]


def misnamed(image: Path, digest: str) -> str | None:
    """Return how a file's digest differs from that in its name or record, or None."""
    named, record = IMPORTED.fullmatch(image.name), recorded(image)
    known = record.sha256 if record and record.file == image.name else named[2] if named else digest
    if digest.startswith(known):
        return None
    return f"the file was changed: its SHA-256 is {digest}, but its name or record has {known}"


def _damaged_import(image: Path, what: str) -> Finding:
    return broken("ENR-08", what, str(image), fix="delete the image and its record, and import the image again")


def _wrong_cpu(image: Path, required: str | None, *, damaged: bool, known: str | None = None) -> list[Finding]:
    if required is None or (damaged and known is None):
        return []
    architecture = known or squashfs.contents(image).architecture
    if architecture in (None, required):
        return []
    what = f"the image is for {architecture} CPUs, but the nodes have {required} CPUs"
    return [broken("ENR-07", what, str(image), fix=f"import the image with --arch {required}")]


def verify(image: Path, *, architecture: str | None) -> tuple[Record | None, list[Finding]]:
    """Return an image's record and all problems of its file.

    `architecture` is that of the nodes; None: that of this machine.

    Raises:
        ConfigError: the file does not exist, or cannot be read.
    """
    tools.require("unsquashfs")
    if not image.is_file():
        raise ConfigError(
            "the file does not exist",
            where=str(image),
            fix="give an image that `runstop image list` lists",
            rule="ENR-07",
        )
    try:
        return recorded(image), faults(image, architecture=architecture or platform.machine())
    except OSError as error:
        raise ConfigError(
            f"the image cannot be read: {error.strerror}",
            where=str(image),
            fix="give this user read permission for the file",
        ) from error


def newest(folder: Path, source: str, *, architecture: str) -> Path | None:
    """Return the image that was imported last from a source, or None; it is not checked."""
    images = [path for path in folder.iterdir() if IMPORTED.fullmatch(path.name) and path.is_file()]
    records = [(record, path) for path in images if (record := recorded(path)) and record.source == source]
    fitting = [(record.imported, path) for record, path in records if record.architecture in (None, architecture)]
    return max(fitting)[1] if fitting else None


def make(folder: Path) -> None:
    """Create the folder if it does not exist.

    Raises:
        ConfigError: it cannot be created or is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be created: {error.strerror}",
            where=str(folder),
            fix="choose another --dir",
            rule="CFG-08",
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            "this user cannot write into the folder", where=str(folder), fix="choose another --dir", rule="CFG-08"
        )


PART = ".import-*.part"
RECORD = re.compile(rf".+-sha256-[0-9a-f]{{{DIGEST_DIGITS}}}\.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """An image, a partial file or a record without image in the folder."""

    path: Path
    size_bytes: int
    record: Record | None
    faults: list[Finding]


def entries(folder: Path) -> list[Entry]:
    """Return the images of a folder by name, partial files of imports, and records without image.

    Raises:
        ConfigError: the folder does not exist, or cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be read: {error.strerror}",
            where=str(folder),
            fix="set --dir to a folder of images that this user can read",
        ) from error
    orphans = [path for path in paths if RECORD.fullmatch(path.name) and path.with_suffix(".sqsh") not in paths]
    parts = [path for path in paths if path.match(PART)]
    images = [path for path in paths if path.suffix in SUFFIXES]
    listed = [*map(_image, images), *(_part(path, folder) for path in parts), *map(_orphan, orphans)]
    return [entry for entry in listed if entry is not None]


def _image(path: Path) -> Entry:
    if not path.is_file():
        return Entry(path, 0, None, [_damaged(path, "this is a broken symbolic link, or not a regular file")])
    try:
        return Entry(path, path.stat().st_size, recorded(path), faults(path, whole=False))
    except OSError as error:
        unreadable = _damaged(path, f"the image cannot be read: {error.strerror}", fix="give this user read permission")
        return Entry(path, 0, None, [unreadable])


def _part(path: Path, folder: Path) -> Entry | None:
    """Return the partial file of an import; None if the import has finished meanwhile."""
    with suppress(FileNotFoundError):
        size = path.stat().st_size
        if is_locked(folder):
            what = "the image is incomplete: an import is running"
            return Entry(path, size, None, [_damaged(path, what, fix="wait until the import ends")])
        return Entry(path, size, None, [_damaged(path, "the image is incomplete: its import was killed")])
    return None


def _orphan(path: Path) -> Entry:
    fix = f"import the image again; or delete the record: rm {quote(str(path))}"
    what = "the image file of this record does not exist"
    missing = broken("ENR-11", what, str(path), fix=fix, severity="warning")
    return Entry(path, 0, recorded(path.with_suffix(".sqsh")), [missing])


def _damaged(path: Path, what: str, *, fix: str | None = None) -> Finding:
    return broken("ENR-08", what, str(path), fix=fix or f"delete this file: rm {quote(str(path))}")


LOCK = ".import.lock"


@contextmanager
def locked(folder: Path, *, say: Callable[[str], None]) -> Iterator[int]:
    """Hold the folder's lock, so that only one import runs; yield its descriptor, which child processes may inherit."""
    try:
        lock = _lock_file(folder)
    except OSError as error:
        raise ConfigError(
            f"the file cannot be written: {error.strerror}",
            where=str(folder / LOCK),
            fix="choose another --dir",
            rule="CFG-08",
        ) from error
    with lock:
        try:
            if not _lock(lock.fileno(), wait=False):
                say(f"waiting for another import into {folder} to finish")
                _lock(lock.fileno(), wait=True)
        except OSError as error:
            raise ConfigError(
                f"the folder cannot be locked: {error.strerror}",
                where=str(folder / LOCK),
                fix="choose a folder on a file system that supports locks (mount Lustre with the option flock)",
            ) from error
        yield lock.fileno()


def _lock_file(folder: Path) -> IO[str]:
    """Open the lock file; users who may write to the folder may also lock it."""
    path = folder / LOCK
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR))
        path.chmod(0o600 | folder.stat().st_mode & 0o066)
    return path.open("r+")


def is_locked(folder: Path) -> bool:
    """Return whether an import into the folder is running."""
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
    """Return an image's name in the plan, its resolved file with size and times, and the digest in its record.

    The digest is None if no record matches the file; for a registry reference there is only the name.
    """
    path = Path(expanded(image) or "")
    if not path.is_file():
        return {"name": image}
    record, file = recorded(path), path.resolve()
    fits = record is not None and (record.file, record.size_bytes) == (file.name, path.stat().st_size)
    digest = record.sha256 if record is not None and fits else None
    return {"name": image, "file": str(file), "sha256": digest, **_file_state(file)}


def is_unchanged(known: dict[str, Any]) -> bool | None:
    """Return whether an image file is still the one that `identity` described; None if it cannot be checked here.

    It is read only if its inode or modification time differs and its size does not.
    """
    path = Path(str(known.get("file") or ""))
    if not path.is_file() or "bytes" not in known:
        return None
    now = _file_state(path)
    if all(known.get(name) == value for name, value in now.items()):
        return True
    if known["bytes"] != now["bytes"]:
        return False
    return atomic_files.sha256(path) == str(known["sha256"]) if known.get("sha256") else None


def _file_state(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "inode": stat.st_ino, "mtime_ns": stat.st_mtime_ns}
