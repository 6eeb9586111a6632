"""The lock of a run: the process that drives the run holds it, and its end releases the lock."""

import fcntl
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.contract import run_files
from bench.errors import ConfigError


@contextmanager
def driving(folder: Path, *, noun: str = "run", fix: str | None = None) -> Iterator[None]:
    """Hold the lock of a run or study while this process drives it.

    Raises:
        ConfigError: another process holds the lock.
    """
    with (folder / run_files.RUN_LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is driving this {noun}",
                where=str(folder),
                fix=fix or f"runstop watch {shlex.quote(str(folder))}",
                rule="CFG-05",
            ) from error
        except OSError:  # the file system has no locks
            pass
        lock.truncate(0)
        print(socket.gethostname(), os.getpid(), file=lock, flush=True)
        yield


def driver(folder: Path) -> tuple[str, int] | None:
    """Return host and process id of the process that holds a run's lock; None if it is free."""
    lock = folder / run_files.RUN_LOCK
    if not lock.exists() or not is_locked(str(lock)):
        return None
    host, pid = lock.read_text().split()
    return host, int(pid)


def is_locked(path: str) -> bool:
    """Return whether a process holds the lock of a file."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
