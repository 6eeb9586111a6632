"""One import into a folder at a time."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from bench.errors import ConfigError

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
