"""JSON files of a run folder, replaced in one step. Secrets in their texts, which logs may have brought, are masked."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from bench.contract import secrets


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
    return json.dumps(secrets.masked_all(content), indent=1) + "\n"


def read(path: Path) -> Any:
    """Return what a JSON file of ours holds; None if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text())
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of ours; empty if it is missing or damaged."""
    found = read(path)
    return found if isinstance(found, dict) else {}
