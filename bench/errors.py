"""Failures that are not bugs in this code."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class BenchError(Exception):
    """The input, the machine or a log is at fault; printed as what, where, fix, without a traceback.

    `rule` is the ID in `bench.rules` of the rule that is broken, where one is known.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str, fix: str, rule: str | None = None) -> None:
        super().__init__(f"{with_rule(rule, what)}\n  where: {where}\n  fix:   {fix}")
        self.what, self.where, self.fix, self.rule = what, where, fix, rule


class ConfigError(BenchError):
    """The request cannot be met; nothing was started."""

    exit_code = 2


class SubmitError(BenchError):
    """The ranks could not be started, or one of them died."""


class LogError(BenchError):
    """A log is missing or does not prove what was asked of it."""


class MissingLogError(LogError):
    """A log that was named is not there: the request is at fault."""

    exit_code = 2


def with_rule(rule: str | None, what: str) -> str:
    """Return a message as logs and screens show it: it begins with the ID of its rule, once."""
    return what if rule is None or what.startswith(f"{rule}: ") else f"{rule}: {what}"


def exit_code_of(end: int) -> int:
    """Return how a process ended as shells say it: its exit code, or 128 + the signal that ended it.

    `end` is a return code of subprocess or of os.waitstatus_to_exitcode: below 0 for a signal.
    """
    return end if end >= 0 else 128 - end


class Stopped(KeyboardInterrupt):
    """A signal asks this process to end.

    Python ends a process by SIGINT, whatever its exit code, once a plain KeyboardInterrupt has left a call of exec(),
    even one that was caught (`run_eval_code_obj` in pythonrun.c). Imports make such calls, for dataclasses for one.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = exit_code_of(-signum)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the block with `Stopped`, so that what must be tidied up is."""

    def stop(signum: int, frame: object) -> None:
        raise Stopped(signum)

    signals = [s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN]  # as by nohup
    previous = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def exit_code_of_signals() -> Iterator[None]:
    """Exit as shells expect: with 128 + a signal that ends the block, SIGPIPE for output that nobody reads any more."""
    try:
        with stopped_by_signals():
            yield
    except Stopped as stop:
        sys.exit(stop.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(exit_code_of(-signal.SIGPIPE))


@contextmanager
def written(where: object) -> Iterator[None]:
    """Raise BenchError where a file of the block cannot be written."""
    try:
        yield
    except OSError as error:
        raise BenchError(
            f"cannot write: {error.strerror or error}",
            where=str(error.filename or where),
            fix="make room, or see that this user may write there, and try again",
            rule="CFG-08",
        ) from error


@contextmanager
def output_is_written() -> Iterator[None]:
    """Raise BenchError where stdout takes no more output, or the working directory is gone."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the working directory no longer exists", where="this shell", fix="change to a folder that exists: cd ~"
        ) from error
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        raise BenchError(
            f"the output cannot be written: {error.strerror}",
            where="stdout",
            fix="write it to another disk, or make room",
        ) from error
