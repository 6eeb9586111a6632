"""Judge whether a log of ours is what its attempt wrote: bound to that attempt, and unchanged since.

Only `bench.contract.mllog` writes these records; a log without them is not judged by them.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from bench.contract import atomic_files, mllog
from bench.errors import LogError
from bench.mlperf import reader
from bench.mlperf.log import Log, finding
from bench.mlperf.reader import Event
from bench.rules.finding import Finding

COPY = "it is a copy: "


def stranger(log: Log, nonce: str) -> str | None:
    """Return why a log was not written by the attempt that has this nonce; None if it was, or holds no record."""
    if not log.events:
        return None
    first = log.events[0]
    if first.key != mllog.RUN_ATTEMPT:
        return f"its first record is {first.key!r:.40}, and not the {mllog.RUN_ATTEMPT} of an attempt"
    return None if first.value == nonce else "its first record has the nonce of another attempt"


def copied(log: Log) -> str | None:
    """Return why a file is a copy of the log that an attempt wrote; None if it is the very file."""
    if log.path is None or not log.events:
        return None
    wrote, file = log.events[0].metadata, log.path.lstat()
    if not stat.S_ISREG(file.st_mode):
        return "it is a link, and not the file that the attempt wrote"
    for name, found in (("inode", file.st_ino), ("uid", file.st_uid)):
        if wrote.get(name) != found:
            return f"{COPY}its {name} is {found}, and the attempt wrote to {name} {wrote.get(name)!r:.40}"
    return None


def _check_content(log: Log) -> Iterator[Finding]:
    """Yield that the bytes of a log are not those that were written."""
    seals, stops = log.all(mllog.LOG_SHA256), log.all(mllog.RUN_STOP)
    if log.path is None or not (seals or log.all(mllog.RUN_ATTEMPT)):
        return
    if not seals and stops:
        what = f"no {mllog.LOG_SHA256} follows run_stop: the end of the log is missing, or was written by somebody else"
        yield finding("LOG-18", "error", stops[-1].line, what)
    if not seals:
        return
    found, rest = _checksums(log.path, [_size(seal) for seal in seals])
    bad = next((seal for seal in seals if found.get(_size(seal)) != seal.value), None)
    if bad is not None:
        what = f"what stands before line {bad.line} is not what was written there: its SHA-256 is another one"
        yield finding("LOG-18", "error", bad.line, what)
    elif rest.find(b"\n") != len(rest) - 1:
        last = seals[-1].line
        yield finding("LOG-18", "error", last, f"something was added behind line {last}, which was the last one")


def _checksums(path: Path, sizes: list[int]) -> tuple[dict[int, str], bytes]:
    try:
        return reader.checksums(path, sizes)
    except OSError as error:
        fix = "name the result_K.txt of a trial"
        raise LogError(f"the log cannot be read again: {error.strerror}", where=str(path), fix=fix) from error


def _size(record: Event) -> int:
    """Return the bytes that a record says it is about; -1 where it does not say."""
    size = record.metadata.get("bytes")
    return size if isinstance(size, int) else -1


def _check_attached(log: Log) -> Iterator[Finding]:
    """Yield attached files that are there and are not as they were; a log that was handed on alone has none of them."""
    for record in log.all(mllog.ATTACHED_FILE) if log.path else ():
        path = attached_path(log, record)
        if path is None:
            yield finding("LOG-18", "error", record.line, f"{record.value!r:.80} is no file in the folder of the log")
        elif os.path.lexists(path) and not _is_unchanged(path, record):
            yield finding("LOG-18", "error", record.line, f"{record.value} is not the file that was attached")


def missing_attachments(log: Log) -> Iterator[Finding]:
    """Yield attached files that are not there; for a log that lies in its own run folder."""
    for record in log.all(mllog.ATTACHED_FILE):
        path = attached_path(log, record)
        if path is not None and not os.path.lexists(path):
            yield finding("LOG-18", "error", record.line, f"{record.value} was attached, and is not there")


def attached_path(log: Log, record: Event) -> Path | None:
    """Return where an attached file lies; None if its name leads out of the log's folder."""
    if log.path is None or not isinstance(record.value, str):
        return None
    name = PurePosixPath(record.value)
    return None if name.is_absolute() or ".." in name.parts else log.path.parent / name


def _is_unchanged(path: Path, record: Event) -> bool:
    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size != _size(record):
            return False
        return atomic_files.sha256(path) == record.metadata.get("sha256")
    return False


CHECKS = (_check_content, _check_attached)
