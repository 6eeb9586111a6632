"""Check that our own log was written by its attempt and was not changed since.

Only `bench.contract.mllog` writes these records; a log without them is not checked.
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


def nonce_mismatch(log: Log, nonce: str) -> str | None:
    """Return why a log was not written by the attempt with this nonce; None if it was, or if it has no record."""
    if not log.events:
        return None
    first = log.events[0]
    if first.key != mllog.RUN_ATTEMPT:
        return f"its first record is {first.key!r:.40} instead of {mllog.RUN_ATTEMPT}"
    return None if first.value == nonce else "its first record has the nonce of another attempt"


def copy_mismatch(log: Log) -> str | None:
    """Return why a file is a copy of the log that an attempt wrote; None if it is the original file."""
    if log.path is None or not log.events:
        return None
    wrote, file = log.events[0].metadata, log.path.lstat()
    if not stat.S_ISREG(file.st_mode):
        return "it is a link, not the file that the attempt wrote"
    for name, number in (("inode", file.st_ino), ("uid", file.st_uid)):
        if wrote.get(name) != number:
            return f"{COPY}its {name} is {number}, but the attempt wrote a file with {name} {wrote.get(name)!r:.40}"
    return None


def _check_content(log: Log) -> Iterator[Finding]:
    """Yield that the bytes of a log were changed after writing."""
    seals, stops = log.all(mllog.LOG_SHA256), log.all(mllog.RUN_STOP)
    if log.path is None or not (seals or log.all(mllog.RUN_ATTEMPT)):
        return
    if not seals and stops:
        what = (
            f"no {mllog.LOG_SHA256} follows run_stop: the end of the log is missing, or another program wrote the log"
        )
        yield finding("LOG-18", "error", stops[-1].line, what)
    if not seals:
        return
    checksums, rest = _checksums(log.path, [_size(seal) for seal in seals])
    bad = next((seal for seal in seals if checksums.get(_size(seal)) != seal.value), None)
    if bad is not None:
        what = f"the text before line {bad.line} was changed: its SHA-256 differs from the logged SHA-256"
        yield finding("LOG-18", "error", bad.line, what)
    elif rest.find(b"\n") != len(rest) - 1:
        last = seals[-1].line
        yield finding("LOG-18", "error", last, f"text was added after line {last}, the last line of the original log")


def _checksums(path: Path, sizes: list[int]) -> tuple[dict[int, str], bytes]:
    try:
        return reader.checksums(path, sizes)
    except OSError as error:
        fix = "give the result_K.txt of a trial"
        raise LogError(f"the log cannot be read again: {error.strerror}", where=str(path), fix=fix) from error


def _size(record: Event) -> int:
    """Return the size in bytes that a record gives; -1 if it gives none."""
    size = record.metadata.get("bytes")
    return size if isinstance(size, int) else -1


def _check_attached(log: Log) -> Iterator[Finding]:
    """Yield attached files that exist and were changed; a log that was copied alone has no attached files."""
    for record in log.all(mllog.ATTACHED_FILE) if log.path else ():
        path = attached_path(log, record)
        if path is None:
            yield finding(
                "LOG-18",
                "error",
                record.line,
                f"the attached file {record.value!r:.80} is not inside the folder of the log",
            )
        elif os.path.lexists(path) and not _is_unchanged(path, record):
            yield finding("LOG-18", "error", record.line, f"the attached file {record.value} was changed")


def missing_attachments(log: Log) -> Iterator[Finding]:
    """Yield attached files that are missing; for a log in its own run folder."""
    for record in log.all(mllog.ATTACHED_FILE):
        path = attached_path(log, record)
        if path is not None and not os.path.lexists(path):
            yield finding("LOG-18", "error", record.line, f"the attached file {record.value} is missing")


def attached_path(log: Log, record: Event) -> Path | None:
    """Return the path of an attached file; None if it is outside the log's folder."""
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
