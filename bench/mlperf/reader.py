"""Read MLLOG records from a log with any other output in it: a complete file, or one that still grows.

The token may stand anywhere in a line, several times, truncated or joined to other output; no content raises an error.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import msgspec

from bench import masking
from bench.errors import LogError, MissingLogError

_TOKEN = b":::MLLOG"
_TOKEN_BYTES = len(_TOKEN)
_CHUNK_BYTES = 1 << 18
"""Small enough to stay in a core's cache between the search and the count."""
_USUAL_RECORD_BYTES = 1 << 12
_MAX_RECORD_BYTES = 1 << 20
"""Longer lines exist, as progress bars without a newline; longer records do not."""
_SYSTEM_WITHIN_BYTES = 1 << 20
_BIGGEST = 2**63 - 1


class Event(msgspec.Struct, frozen=True, gc=False):
    """One record, and the 1-based line of the file that it stands in."""

    time_ms: Annotated[int, msgspec.Meta(ge=-_BIGGEST, le=_BIGGEST)]
    event_type: str
    key: str
    value: Any
    metadata: dict[str, Any]
    line: int = msgspec.field(default=0, name=":::")
    """Ours, not the record's."""


@dataclass(frozen=True, slots=True)
class Garbled:
    """A token that no readable record follows."""

    line: int
    text: str
    reason: str


def read(path: Path | str) -> tuple[list[Event], list[Garbled]]:
    """Return every record of a log in the order of the file; no content makes this fail.

    Text between records costs a search for the token and a count of newlines, and no memory.

    Raises:
        LogError: the file cannot be opened; a MissingLogError if it is not there.
    """
    found: list[Event | Garbled] = []
    scanner = Scanner()
    try:
        if Path(path).is_fifo():  # system() and the official checker read it again
            raise OSError(errno.ESPIPE, "it is a pipe, which can be read only once; save it to a file")
        with FileIO(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                found += scanner.feed(chunk)
    except OSError as error:
        reason = error.strerror or "unreadable"
        kind = MissingLogError if isinstance(error, FileNotFoundError | NotADirectoryError) else LogError
        raise kind(
            f"the log cannot be read: {reason}", where=str(path), fix="name the result_K.txt of a trial"
        ) from error
    found += scanner.finish()
    return [r for r in found if isinstance(r, Event)], [r for r in found if isinstance(r, Garbled)]


class Follower:
    """Reads a log while it is written. A poll reads only what was added since the last one, and skips garbled records.

    A file that was truncated or overwritten is read again from its start. A file that was replaced is first read to its
    end.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: int | None = None
        self._offset = 0
        self._scanner = Scanner()
        self.restarts = 0
        """How often the log began anew."""

    def poll(self) -> list[Event]:
        """Return the events that were completed since the last poll; none while there is no file."""
        if self._file is None and not self._open():
            return []
        found = self._added()
        if self._is_replaced():
            found += [*self._added(), *self._scanner.finish()]
            self.close()
            self.restarts += 1
            found += self._added() if self._open() else []
        return [record for record in found if isinstance(record, Event)]

    def close(self) -> None:
        """Let go of the file; a later poll starts from its beginning."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._offset, self._scanner = None, 0, Scanner()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> bool:
        if self._path.is_file():  # what is no file, a pipe for one, could block for ever
            with suppress(OSError):  # gone already, or not ours to read yet
                self._file = os.open(self._path, os.O_RDONLY)
        return self._file is not None

    def _is_replaced(self) -> bool:
        """Return whether the path now names another file; while it names none, the one that is open may still grow."""
        assert self._file is not None
        with suppress(OSError):
            return not os.path.samestat(os.fstat(self._file), self._path.stat())
        return False

    def _added(self) -> list[Event | Garbled]:
        assert self._file is not None
        if os.fstat(self._file).st_size < self._offset:
            self.restarts += 1
            self._offset, self._scanner = 0, Scanner()
        found: list[Event | Garbled] = []
        while chunk := os.pread(self._file, _CHUNK_BYTES, self._offset):
            self._offset += len(chunk)
            found += self._scanner.feed(chunk)
        return found


class Scanner:
    """Finds records in a stream of bytes, however it is cut into chunks; holds no more than one unfinished record."""

    def __init__(self) -> None:
        self._rest = b""
        self._line = 1

    def feed(self, chunk: bytes) -> list[Event | Garbled]:
        """Return the records of the lines that this chunk completes."""
        return self._scan(self._rest + chunk if self._rest else chunk, final=False)

    def finish(self) -> list[Event | Garbled]:
        """Return what the last line holds, which no newline ends."""
        return self._scan(self._rest, final=True)

    def _scan(self, data: bytes, *, final: bool) -> list[Event | Garbled]:
        found: list[Event | Garbled] = []
        size, counted, done = len(data), 0, 0
        while (at := data.find(_TOKEN, done)) >= 0:
            done = at + _TOKEN_BYTES
            self._line += data.count(b"\n", counted, at)
            counted = at
            end = stop = data.find(b"\n", done, done + _MAX_RECORD_BYTES)
            if end < 0:
                stop = min(size, done + _MAX_RECORD_BYTES)
            following = data.find(_TOKEN, done, stop) if stop - done > _USUAL_RECORD_BYTES else -1
            raw = data[done : stop if following < 0 else following]
            try:  # the record reaches to the end of the line, as far as it is there, or in a long one to the next token
                event = _DECODE(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                raw = data[done:stop]
                if end < 0 and stop == size and not final:
                    done = at
                    break
                record, length = _record(raw, self._line)
                found += [record] if record else []
            else:
                _SET(event, "line", self._line)
                found.append(event)
                length = len(raw)
            done += length
        else:
            done = max(done, size - _TOKEN_BYTES + 1)  # a token may begin in these bytes
        self._line += data.count(b"\n", counted, done)
        self._rest = data[done:]
        return found


_DECODE = msgspec.json.Decoder(Event).decode
_SET = msgspec.structs.force_setattr
_DECODER = json.JSONDecoder()


def _record(raw: bytes, line: int) -> tuple[Event | Garbled | None, int]:
    """Return what follows a token up to the end of its line, whatever it is, and how many bytes it takes.

    None is a token that somebody only mentions, as in `grep ':::MLLOG'`: neither blank nor brace follows it.
    """
    body = raw.lstrip(b" \t")
    blanks = len(raw) - len(body)
    if not body.startswith(b"{"):
        mention = body and not blanks
        return (None if mention else Garbled(line, _quoted(raw), "not a JSON object")), 0
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = body.decode("latin-1")  # a byte a letter, so that lengths agree; strings are put right below
    try:
        record, end = _DECODER.raw_decode(text)
        length = blanks + (end if len(text) == len(body) else len(text[:end].encode()))
        if len(text) == len(body) and not text.isascii():
            record = json.loads(body[:end].decode(errors="replace"))
        return _event(record, line), length
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        return Garbled(line, _quoted(raw), reason), 0


def _quoted(raw: bytes) -> str:
    return (_TOKEN + raw[:120]).decode(errors="replace").rstrip()


def _event(record: Any, line: int) -> Event:
    """Return the record as an event; ValueError says what it lacks."""
    if missing := [name for name in Event.__struct_fields__[:-1] if name not in record]:
        raise ValueError(f"no {', '.join(missing)}")
    time_ms, event_type, key, value, metadata = (record[name] for name in Event.__struct_fields__[:-1])
    if not is_number(time_ms):
        raise ValueError(f"time_ms is {time_ms!r:.40}, not a number of milliseconds")
    if not isinstance(key, str) or not isinstance(event_type, str):
        raise ValueError("key and event_type are not both text")
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata is {metadata!r:.40}, not an object")
    return Event(int(time_ms), event_type, key, value, metadata, line)


def system(path: Path | str) -> dict[str, Any]:
    """Return the SYSJSON record that MLPerf's run scripts print ahead of a trial; empty where there is none."""
    with suppress(OSError), FileIO(path) as file:
        head = file.read(_SYSTEM_WITHIN_BYTES)
        for mark in re.finditer(rb":::SYSJSON\s*(\{.*)", head):
            with suppress(ValueError, RecursionError):
                record = dict(_DECODER.raw_decode(mark[1].decode(errors="replace"))[0])
                json.dumps(record, allow_nan=False)
                return record
    return {}


def checksums(path: Path | str, sizes: Collection[int]) -> tuple[dict[int, str], bytes]:
    """Return the SHA-256 of the first bytes of a file, by how many these are, and what follows the most of them.

    Of what follows, no more is returned than a record may have. A size above the file's has no checksum.

    Raises:
        OSError: the file cannot be read.
    """
    found, whole, done = {}, hashlib.sha256(), 0
    with FileIO(path) as file:
        for size in sorted(size for size in sizes if size >= 0):
            while done < size and (chunk := file.read(min(_CHUNK_BYTES, size - done))):
                whole.update(chunk)
                done += len(chunk)
            if done == size:
                found[size] = whole.hexdigest()
        return found, file.read(_MAX_RECORD_BYTES)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value from a log is a finite number that fits into 64 bits; true and false are not numbers."""
    return (type(value) is float or type(value) is int) and -_BIGGEST <= value <= _BIGGEST


def printable(text: str) -> str:
    """Return text from a log without what would steer a terminal or break a line."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def clean(text: str) -> str:
    """Return text from a log as it may be shown: no secrets, nothing that steers a terminal or breaks a line."""
    return printable(masking.masked(text))
