"""End a rank on a signal, on its launcher's death or on an error: within a second, and with its log closed."""

import errno
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

from bench.errors import BenchError

SIGNALS = {signal.SIGINT, signal.SIGTERM}
SIGNAL_POLL_S, POLL_S = 0.2, 0.5
PRINT_S = 2.0
"""How long the last output may take: nobody may be there to read it."""
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


class Guard:
    """Ends this process early; `finish` is what must be called before, by default nothing."""

    finish: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, error_file: Path) -> None:
        self._error_file, self.ending = error_file, threading.Lock()
        """The lock is held by the thread that ends this process, and never released: other threads wait for the end."""

    def fail(self, error: BaseException) -> NoReturn:
        """Close the log, leave the error as the reason, and exit. Of several threads that call it the first one counts.

        Where ranks stall, the watchdog's account comes first; ending one rank then breaks the collective of another.
        """
        with self.ending:
            try:
                _close(self)
            finally:
                _fail(error, self._error_file)


@contextmanager
def guarded(error_file: Path) -> Iterator[Guard]:
    """Run the body. If anything ends it early, call guard.finish, write the reason to `error_file` and exit.

    A rank that waits in a collective runs no Python, so a thread of its own receives the signals. Enter before other
    threads exist: they inherit the mask that leaves the signals to that thread. The exit is os._exit, because a clean
    shutdown would wait for ranks that have ended.

    After a body that has ended well the log is complete, and signals have their usual effect, one that has come before
    at once: Python's shutdown may hang, and whoever sends a signal wants no more than that the process ends.
    """
    guard, done, parent = Guard(error_file), threading.Event(), os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def watch() -> None:
        while not done.is_set():
            received = _received()
            if received is None and os.getppid() == parent:
                continue
            with guard.ending:  # a rank that fails already ends with its own reason
                if not done.is_set():
                    _close(guard)
                    _exit(128 + (received or signal.SIGTERM))

    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield guard
    except BaseException as error:  # noqa: BLE001 - every error closes the log and leaves its reason
        guard.fail(error)
    with guard.ending:  # unless somebody ends this process already
        done.set()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _received() -> int | None:
    """Return a signal that waits for this process, after a moment.

    signal.sigtimedwait would tell sooner. But in a process that was stopped and continued, as in a suspended job,
    CPython 3.11's returns memory that nobody has written to, which was taken for SIGINT here.
    """
    time.sleep(SIGNAL_POLL_S)
    return min(signal.sigpending() & SIGNALS, default=None)


def _close(guard: Guard) -> None:
    """Call finish. It may find the disk full, and the process must end all the same."""
    with suppress(OSError):
        guard.finish()


def _fail(error: BaseException, error_file: Path) -> NoReturn:
    """Print the error and, for the launcher, write it to a file: {time, exit_code, rule, what, where, fix}."""
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
        name = str(error.filename or "the run folder")
        fix = "make room, or set LOGDIR"
        error = BenchError(f"cannot write: {error.strerror}", where=name, fix=fix, rule="CFG-08")
    if not isinstance(error, BenchError):
        trace = "".join(traceback.format_exception(error)).rstrip()
        error = BenchError(
            trace, where=error_file.stem, fix="read the traceback's last lines; its file is beside the log"
        )
    account = {name: getattr(error, name) for name in ("exit_code", "rule", "what", "where", "fix")}
    try:
        with suppress(OSError):  # the error is printed too, perhaps to another disk
            error_file.parent.mkdir(exist_ok=True)
            error_file.write_text(json.dumps({"time": time.time()} | account))
    finally:
        _exit(error.exit_code, f"{error}\n")


def _exit(code: int, last_words: str = "") -> NoReturn:
    """End after all that this process has started, such as torch's compilers and the writers of a checkpoint.

    They would see only later that they are alone, and until then keep the run folder's file system busy.
    """
    try:
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=POLL_S)
        printing = threading.Thread(target=_print, args=(last_words,), daemon=True)
        printing.start()
        printing.join(PRINT_S)
    finally:
        os._exit(code)


def _print(last_words: str) -> None:
    """Write to stderr, and what Python still holds for stdout; on a full pipe this takes until somebody reads it."""
    with suppress(OSError):  # they may lie on the disk that is full
        print(last_words, end="", file=sys.stderr, flush=True)
    with suppress(OSError):
        sys.stdout.flush()
