"""End a rank on a signal, at the end of its launcher or on an error: within a second, and with its log closed."""

import atexit
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
"""Time limit for the last output: the reader of the pipe may have stopped."""
CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


class Guard:
    """Ends this process early; `finish` is called first."""

    finish: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, error_file: Path) -> None:
        self._error_file, self.ending = error_file, threading.Lock()
        """Held by the thread that ends this process, and never released, so that other threads wait for the end."""

    def fail(self, error: BaseException) -> NoReturn:
        """Close the log, write the error to the error file, and exit. If several threads call this, the first one wins.

        After a stall the watchdog's error is the first; ending one rank then breaks the collectives of the others.
        """
        with self.ending:
            try:
                _close(self)
            finally:
                _fail(error, self._error_file)


@contextmanager
def guarded(error_file: Path) -> Iterator[Guard]:
    """Run the body. If it ends early, call guard.finish, write the reason to `error_file` and exit.

    A rank that waits in a collective runs no Python, so a separate thread receives the signals. Enter this before other
    threads exist: they inherit the signal mask. The exit is os._exit, because a clean shutdown would wait for ranks
    that have ended.

    After a successful body the log is complete, and signals have their default effect again, including pending ones:
    Python's shutdown may hang, and a signal must then end the process.
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
    except BaseException as error:  # noqa: BLE001 - every error closes the log and is recorded
        guard.fail(error)
    with guard.ending:  # waits if another thread is ending this process
        done.set()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def exit_process() -> NoReturn:
    """End this process after its last task with exit code 0, without Python's own shutdown.

    Libraries may still have references to groups of gloo, as DeepSpeed does. A thread of such a group needs the GIL to
    free a tensor. During Python's shutdown it does not get the GIL, and the process would end with SIGABRT. Functions
    that are registered with atexit run before.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def _received() -> int | None:
    """Return a pending signal of this process, after SIGNAL_POLL_S.

    signal.sigtimedwait would return sooner. But in a process that was stopped and continued, as in a suspended job,
    CPython 3.11's returns uninitialized memory, which was read as SIGINT here.
    """
    time.sleep(SIGNAL_POLL_S)
    return min(signal.sigpending() & SIGNALS, default=None)


def _close(guard: Guard) -> None:
    """Call finish. If the disk is full, the process must end anyway."""
    with suppress(OSError):
        guard.finish()


def _fail(error: BaseException, error_file: Path) -> NoReturn:
    """Print the error and, for the launcher, write it to a file: {time, exit_code, rule, what, where, fix}."""
    if isinstance(error, OSError) and error.errno in CANNOT_WRITE:
        name = str(error.filename or "the run folder")
        fix = "free disk space, or set LOGDIR to another disk"
        error = BenchError(f"cannot write: {error.strerror}", where=name, fix=fix, rule="CFG-08")
    if not isinstance(error, BenchError):
        trace = "".join(traceback.format_exception(error)).rstrip()
        error = BenchError(
            trace, where=error_file.stem, fix="read the last lines of the traceback, which is also in rank_logs/"
        )
    account = {name: getattr(error, name) for name in ("exit_code", "rule", "what", "where", "fix")}
    try:
        with suppress(OSError):  # the error is also printed, perhaps to another disk
            error_file.parent.mkdir(exist_ok=True)
            error_file.write_text(json.dumps({"time": time.time()} | account))
    finally:
        _exit(error.exit_code, f"{error}\n")


def _exit(code: int, message: str = "") -> NoReturn:
    """Exit after killing all child processes, such as torch's compilers and the writers of a checkpoint.

    Otherwise they would notice the end of their parent only later, and keep the run folder's file system busy.
    """
    try:
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=POLL_S)
        printing = threading.Thread(target=_print, args=(message,), daemon=True)
        printing.start()
        printing.join(PRINT_S)
    finally:
        os._exit(code)


def _print(message: str) -> None:
    """Write to stderr, and flush stdout; on a full pipe this blocks until it is read."""
    with suppress(OSError):  # they may be files on the full disk
        print(message, end="", file=sys.stderr, flush=True)
    with suppress(OSError):
        sys.stdout.flush()
