"""Files of a run: JSON and folders replaced in one step, and checksums. Standard library only: ranks use it."""

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


def write(path: Path, content: Any) -> None:
    """Replace a JSON file in one step: a reader, or a crash, never meets half of it.

    Raises:
        OSError: it could not be written in full, and the file is as it was.
    """
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        with _opened_anew(part) as file:
            file.write(text(content))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _opened_anew(path: Path) -> IO[str]:
    """Return a file that was not there: no link is followed. What a dead process left there is removed."""
    try:
        return path.open("x")
    except FileExistsError:
        path.unlink()
        return path.open("x")


@contextmanager
def kept(path: Path) -> Iterator[None]:
    """Put the file that is there now, or none, back if the block fails.

    This takes no room, for the disk may be full by then.
    """
    aside, is_there = path.with_suffix(".before"), path.exists()
    aside.unlink(missing_ok=True)
    if is_there:
        _give_second_name(path, aside)
    try:
        yield
    except BaseException:
        if is_there:
            aside.replace(path)
            aside.unlink(missing_ok=True)  # two names of one file: replace leaves both
        else:
            path.unlink(missing_ok=True)
        raise
    with suppress(OSError):
        aside.unlink(missing_ok=True)


def _give_second_name(path: Path, aside: Path) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(path, aside)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        try:
            shutil.copy2(path, aside)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def text(content: Any) -> str:
    """Return what `write` writes."""
    return json.dumps(content, indent=1) + "\n"


def read(path: Path) -> Any:
    """Return what a JSON file of ours holds; None if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text())
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of ours; empty if it is missing or damaged."""
    found = read(path)
    return found if isinstance(found, dict) else {}


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


@contextmanager
def existing(folder: Path) -> Iterator[None]:
    """Make a folder and its parents unless they are there; if the block fails, those that were made are gone again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # somebody has put something there
                path.rmdir()
        raise


@contextmanager
def appearing(folder: Path, *, part: Path | None = None) -> Iterator[Path]:
    """Yield a folder that takes its name when the block is done; if the block fails, nothing is left of it.

    `part` is what it is called meanwhile; what lies there already is of a process that was killed, and is removed.
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
