"""The lock of a run: the process that drives the run holds it, and its end releases the lock."""

import errno
import fcntl
import os
import re
import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.contract import regular_files, run_files
from bench.errors import ConfigError, SubmitError

MAX_BYTES = 4096
UNKNOWN_HOST = "an unknown host"


@contextmanager
def driving(folder: Path, *, noun: str = "run", fix: str | None = None) -> Iterator[None]:
    """Hold the lock of a run or study while this process drives it.

    Raises:
        ConfigError: another process holds the lock.
    """
    with open(folder / run_files.RUN_LOCK, "a+", opener=opener) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process is already working on this {noun}",
                where=str(folder),
                fix=fix or f"to follow the run: runstop watch {shlex.quote(str(folder))}",
                rule="CFG-05",
            ) from error
        except OSError:  # the file system has no locks
            pass
        lock.truncate(0)
        print(socket.gethostname(), os.getpid(), file=lock, flush=True)
        yield


def opener(path: str, flags: int) -> int:
    """Open the lock without following a symbolic link; other users cannot write to a new one."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666 & ~regular_files.OTHERS_WRITE)


def driver(folder: Path) -> tuple[str, int] | None:
    """Return host and process id of the process that holds a run's lock; None if it is free.

    UNKNOWN_HOST if the file does not name them.
    """
    lock = folder / run_files.RUN_LOCK
    try:
        if not is_locked(lock):
            return None
        text = regular_files.read_text(lock, errors="replace", max_bytes=MAX_BYTES)
    except OSError:  # there is none, or it is not a file
        return None
    named = re.fullmatch(r"(\S+) ([1-9][0-9]{0,9})\s*", text)
    return (named[1], int(named[2])) if named else (UNKNOWN_HOST, 0)


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file; OSError if it is not a regular file."""
    with regular_files.opened(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stop_driver(folder: Path) -> None:
    """Send SIGTERM to the process on this machine that drives a run.

    Only to a process of this user that has the lock open: the number in the file may be that of any process.

    Raises:
        SubmitError: there is no such process.
    """
    host, pid = driver(folder) or ("", 0)
    if not host:
        fix = "no action is needed; `runstop runs` lists the active runs"
        raise SubmitError("no process works on this run, so there is nothing to cancel", where=str(folder), fix=fix)
    if host != socket.gethostname():
        what = f"the process of this run is on the host {host}, and only this host can stop the process"
        raise SubmitError(what, where=str(folder), fix=f"run the same command on {host}")
    try:
        process = os.pidfd_open(pid)  # after this, the number cannot become that of another process
    except (OSError, OverflowError) as error:
        raise _not_the_driver(folder, pid) from error
    try:
        if not _has_open(pid, folder / run_files.RUN_LOCK):
            raise _not_the_driver(folder, pid)
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EPERM):
            raise
        raise _not_the_driver(folder, pid) from error
    finally:
        os.close(process)


def _has_open(pid: int, path: Path) -> bool:
    """Return whether a process of this user has a file open."""
    files, expected = Path(f"/proc/{pid}/fd"), path.lstat()
    try:
        if files.stat().st_uid != os.geteuid():
            return False
        return any(_is_same(file, expected) for file in files.iterdir())
    except OSError:
        return False


def _is_same(file: Path, expected: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), expected)
    except OSError:  # closed meanwhile
        return False


def _not_the_driver(folder: Path, pid: int) -> SubmitError:
    return SubmitError(
        f"the lock file names process {pid}, but this process does not hold the lock of the run",
        where=str(folder / run_files.RUN_LOCK),
        fix=f"find the process of the run: fuser {folder / run_files.RUN_LOCK}",
    )
