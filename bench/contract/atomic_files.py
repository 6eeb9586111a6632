"""Atomic writes of JSON files and folders, and checksums. Standard library only: ranks import it."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.contract import regular_files


def write(path: Path, content: Any) -> None:
    """Replace a JSON file atomically; raises like `write_text`."""
    write_text(path, text(content))


def write_text(path: Path, content: str) -> None:
    """Replace a text file atomically: readers never see a partial file, even after a crash.

    Raises:
        OSError: writing failed; the file is unchanged.
    """
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        with _open_new(part) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _open_new(path: Path) -> IO[str]:
    """Create a file without following links; a file left by a dead process is removed first."""
    try:
        return create(path)
    except FileExistsError:
        path.unlink()
        return create(path)


def create(path: Path) -> IO[str]:
    """Create a file that other users cannot write to, whatever the umask; FileExistsError if it exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666 & ~regular_files.OTHERS_WRITE), "w")


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Restore a file, or its absence, if the block fails.

    The backup is a hard link, which needs no space on a full disk.
    """
    backup, exists = path.with_suffix(".before"), path.exists()
    backup.unlink(missing_ok=True)
    if exists:
        _link(path, backup)
    try:
        yield
    except BaseException:
        if exists:
            backup.replace(path)
            backup.unlink(missing_ok=True)  # replace does nothing if both are links to one file
        else:
            path.unlink(missing_ok=True)
        raise
    with suppress(OSError):
        backup.unlink(missing_ok=True)


def _link(path: Path, backup: Path) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(path, backup)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        try:
            shutil.copy2(path, backup)
        except BaseException:
            backup.unlink(missing_ok=True)
            raise


def text(content: Any) -> str:
    """Return the text that `write` writes."""
    return json.dumps(content, indent=1) + "\n"


def read(path: Path, *, follows_links: bool = False) -> Any:
    """Return the content of a JSON file; None if it is missing or damaged, or is a link, unless `follows_links`."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(regular_files.read_bytes(path, follows_links=follows_links))
    return None


def read_object(path: Path, *, follows_links: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file; empty where `read` returns None."""
    content = read(path, follows_links=follows_links)
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Size and checksum of a file."""

    bytes: int
    sha256: str


def checksum(path: Path, *, max_bytes: int | None = None) -> Content:
    """Return the size and the SHA-256 of a file; OSError if it is not a file, or has more than `max_bytes`."""
    with regular_files.opened(path, follows_links=True, max_bytes=max_bytes) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Content(bytes=file.tell(), sha256=digest)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    return checksum(path).sha256


@contextmanager
def existing(folder: Path) -> Iterator[None]:
    """Create a folder and its missing parents; if the block fails, remove those that it created."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # not empty: another process uses it
                path.rmdir()
        raise


@contextmanager
def atomic_folder(folder: Path, *, part: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at the end of the block, and removed if the block fails.

    `part` is the temporary name; a folder of that name, left by a killed process, is removed first.
    """
    part = part or folder.with_name(f"{folder.name}.part")
    with existing(part.parent):
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            yield part
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
