"""End a rank honestly: on a signal, on its launcher's death or on an error, within a second and with its log closed."""

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
POLL_S = 0.5
NO_PLACE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}


class Guard:
    """Holds what must be done before this process ends early; nothing until somebody sets it."""

    finish: Callable[[], object] = staticmethod(lambda: None)


@contextmanager
def guarded(error_file: Path) -> Iterator[Guard]:
    """Run the body; whatever ends it early, call guard.finish, leave the reason in `error_file` and exit.

    A rank that waits in a collective runs no Python, so signals are taken by a thread of their own. Enter before other
    threads exist: they inherit the mask that leaves the signals to it. The exit is os._exit: a clean shutdown would
    wait for ranks that are gone.
    """
    guard, done, parent = Guard(), threading.Event(), os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def watch() -> None:
        while not done.is_set():
            got = signal.sigtimedwait(SIGNALS, POLL_S)
            if got is None and os.getppid() == parent:
                continue
            if not done.is_set():
                _close(guard)
                _exit(128 + (got.si_signo if got else signal.SIGTERM))

    threading.Thread(target=watch, name="signals", daemon=True).start()
    try:
        yield guard
    except BaseException as error:  # noqa: BLE001 - whatever it is, the log is closed and the reason kept
        _close(guard)
        _fail(error, error_file)
    finally:
        done.set()


def _close(guard: Guard) -> None:
    """Call finish, which may find the disk full: that must not keep the process from ending."""
    with suppress(OSError):
        guard.finish()


def _fail(error: BaseException, error_file: Path) -> NoReturn:
    """Say what went wrong on stderr and, for the launcher, in a file: {time, exit_code, what, where, fix}."""
    if isinstance(error, OSError) and error.errno in NO_PLACE:
        name = str(error.filename or "the run folder")
        error = BenchError(f"cannot write: {error.strerror}", where=name, fix="make room, or set LOGDIR")
    if not isinstance(error, BenchError):
        trace = "".join(traceback.format_exception(error)).rstrip()
        error = BenchError(
            trace, where=error_file.stem, fix="read the traceback's last lines; its file is beside the log"
        )
    print(error, file=sys.stderr, flush=True)
    account = {"exit_code": error.exit_code, "what": error.what, "where": error.where, "fix": error.fix}
    with suppress(OSError):  # said on stderr already, which may lie on a disk that is not full
        error_file.parent.mkdir(exist_ok=True)
        error_file.write_text(json.dumps({"time": time.time()} | account))
    _exit(error.exit_code)


def _exit(code: int) -> NoReturn:
    """End after all that this process has started, such as torch's compilers and the writers of a checkpoint.

    They would see only later that they are alone, and until then keep the run folder's file system busy.
    """
    try:
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=POLL_S)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
