"""Errors with a message for the user, exit codes, and the signals that stop a process."""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class BenchError(Exception):
    """An error in the input, on the machine or in a log; printed as what, where, fix, without a traceback.

    `rule` is the ID in `bench.rules` of the broken rule, if there is one.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str, fix: str, rule: str | None = None) -> None:
        what, where, fix = shown(what), shown(where), shown(fix)
        super().__init__(f"{with_rule(rule, what)}\n  where: {where}\n  fix:   {fix}")
        self.what, self.where, self.fix, self.rule = what, where, fix, rule


class ConfigError(BenchError):
    """The request is wrong or cannot be met; nothing was started."""

    exit_code = 2


def joined(errors: Sequence[ConfigError]) -> ConfigError:
    """Return one error with the messages of all, and the fields of the first."""
    first, *others = errors
    if others:
        first.args = ("\n".join(map(str, errors)),)
    return first


class SubmitError(BenchError):
    """The ranks could not be started, or one of them died."""


class LogError(BenchError):
    """A log is missing, damaged, or lacks required records."""


class MissingLogError(LogError):
    """A log that the user named does not exist."""

    exit_code = 2


class NotALogError(LogError):
    """A file or folder that the user named as a log is none."""

    exit_code = 2


class IncompleteError(BenchError):
    """A run has no result, since it has not ended, or was interrupted."""


def shown(text: str) -> str:
    """Return a text without characters that control a terminal: names of files and texts of other users have them."""
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


FINAL_CODES = (1, 2)
"""Exit codes of a run that has failed finally: 1 for its work, 2 for its input. After any other code but 0 a backend
may start the run again."""


def with_rule(rule: str | None, what: str) -> str:
    """Return a message that begins with the ID of its rule, once."""
    return what if rule is None or what.startswith(f"{rule}: ") else f"{rule}: {what}"


def exit_code_of(end: int) -> int:
    """Return the exit status that a shell reports: the exit code, or 128 + the signal that ended the process.

    `end` is a return code of subprocess or of os.waitstatus_to_exitcode: below 0 for a signal.
    """
    return end if end >= 0 else 128 - end


class Stopped(KeyboardInterrupt):
    """A signal requests this process to end.

    Python ends a process by SIGINT, whatever its exit code, once a plain KeyboardInterrupt has left a call of exec(),
    even one that was caught (`run_eval_code_obj` in pythonrun.c). Imports make such calls, for dataclasses for one.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.exit_code = exit_code_of(-signum)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise `Stopped` in the block on SIGTERM and Ctrl-C, so that its cleanup runs."""

    def stop(signum: int, frame: object) -> None:
        raise Stopped(signum)

    signals = [
        s for s in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(s) is not signal.SIG_IGN
    ]  # an ignored signal stays ignored, as with nohup
    previous = {signum: signal.signal(signum, stop) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def exit_code_of_signals() -> Iterator[None]:
    """Exit with 128 + the signal that ends the block; with SIGPIPE's number if the reader of stdout has ended."""
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
    """Raise BenchError if a file cannot be written in the block."""
    try:
        yield
    except OSError as error:
        raise BenchError(
            f"cannot write: {error.strerror or error}",
            where=str(error.filename or where),
            fix="free disk space, or give this user write permission for this path; then run the command again",
            rule="CFG-08",
        ) from error


def every_character_is_written() -> None:
    """Write characters that the encoding of stdout or stderr lacks as escapes, such as \\xfc in ASCII."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def output_is_written() -> Iterator[None]:
    """Raise BenchError if stdout cannot be written, or if the working directory no longer exists."""
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
            fix="write the output to another disk, or free disk space",
        ) from error
