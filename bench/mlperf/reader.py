"""Read MLLOG records from a log that may contain any other output: a complete file, or one that still grows.

The token may be anywhere in a line, several times, truncated or joined to other output. Any content can be read.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import msgspec

from bench import masking
from bench.contract import codec, mllog, regular_files
from bench.errors import LogError, MissingLogError, NotALogError

_TOKEN = b":::MLLOG"
_TOKEN_BYTES = len(_TOKEN)
_CHUNK_BYTES = 1 << 18
"""Small enough for a core's cache between the search and the count."""
_USUAL_RECORD_BYTES = 1 << 12
_MAX_RECORD_BYTES = 1 << 20
"""Longer lines exist, such as progress bars without a newline; longer records do not."""
_SYSTEM_WITHIN_BYTES = 1 << 20
_BIGGEST = 2**63 - 1


class Event(msgspec.Struct, frozen=True, gc=False):
    """One record, and its 1-based line in the file."""

    time_ms: Annotated[int, msgspec.Meta(ge=-_BIGGEST, le=_BIGGEST)]
    event_type: str
    key: str
    value: Any
    metadata: dict[str, Any]
    line: int = msgspec.field(default=0, name=":::")
    """Set by the reader, not a field of the record."""


@dataclass(frozen=True, slots=True)
class Garbled:
    """A token without a readable record after it."""

    line: int
    text: str
    reason: str


def read(path: Path | str) -> tuple[list[Event], list[Garbled]]:
    """Return every record of a log, and the malformed ones, in the order of the file; any content can be read.

    Text between records is only searched for the token and for newlines; it uses no memory.

    Raises:
        LogError: the file cannot be opened; MissingLogError if it does not exist.
    """
    records: list[Event | Garbled] = []
    scanner = Scanner()
    try:
        if Path(path).is_fifo():  # system() and the official checker read it again
            raise OSError(errno.ESPIPE, "the log is a pipe, which can be read only once: write the log to a file first")
        for chunk in regular_files.chunks(path, _CHUNK_BYTES):
            records += scanner.feed(chunk)
    except IsADirectoryError as error:
        raise NotALogError(
            "this path is a folder, not a log", where=str(path), fix="give the result_K.txt of a trial"
        ) from error
    except OSError as error:
        reason = error.strerror or "unreadable"
        kind = MissingLogError if isinstance(error, FileNotFoundError | NotADirectoryError) else LogError
        raise kind(
            f"the log cannot be read: {reason}", where=str(path), fix="give the result_K.txt of a trial"
        ) from error
    records += scanner.finish()
    return [r for r in records if isinstance(r, Event)], [r for r in records if isinstance(r, Garbled)]


class Follower:
    """Read a log while it is written. A poll reads only new text, and skips malformed records.

    A file that was truncated or overwritten is read again from its start. If the file was replaced, the old file is
    first read to its end.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._file: int | None = None
        self._offset = 0
        self._scanner = Scanner()
        self.restarts = 0
        """How often the log started again from its beginning."""

    def poll(self) -> list[Event]:
        """Return the events that were completed since the last poll; none until the file exists."""
        if self._file is None and not self._open():
            return []
        records = self._added()
        if self._is_replaced():
            records += [*self._added(), *self._scanner.finish()]
            self.close()
            self.restarts += 1
            records += self._added() if self._open() else []
        return [record for record in records if isinstance(record, Event)]

    def close(self) -> None:
        """Close the file; a later poll starts from its beginning."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._offset, self._scanner = None, 0, Scanner()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> bool:
        # It may not exist, or not be readable yet; a pipe could block forever.
        limit = regular_files.MAX_LOG_BYTES
        with suppress(OSError), regular_files.opened(self._path, follows_links=True, max_bytes=limit) as file:
            self._file = os.dup(file.fileno())
        return self._file is not None

    def _is_replaced(self) -> bool:
        """Return whether the path is now another file; if the path does not exist, the open file may still grow."""
        assert self._file is not None
        with suppress(OSError):
            return not os.path.samestat(os.fstat(self._file), self._path.stat())
        return False

    def _added(self) -> list[Event | Garbled]:
        assert self._file is not None
        if os.fstat(self._file).st_size < self._offset:
            self.restarts += 1
            self._offset, self._scanner = 0, Scanner()
        records: list[Event | Garbled] = []
        while chunk := os.pread(self._file, _CHUNK_BYTES, self._offset):
            self._offset += len(chunk)
            records += self._scanner.feed(chunk)
        return records


class Scanner:
    """Find records in a stream of byte chunks; keeps at most one unfinished record in memory."""

    def __init__(self) -> None:
        self._rest = b""
        self._line = 1

    def feed(self, chunk: bytes) -> list[Event | Garbled]:
        """Return the records of the lines that this chunk completes."""
        return self._scan(self._rest + chunk if self._rest else chunk, final=False)

    def finish(self) -> list[Event | Garbled]:
        """Return the records of the last line if it has no newline."""
        return self._scan(self._rest, final=True)

    def _scan(self, data: bytes, *, final: bool) -> list[Event | Garbled]:
        records: list[Event | Garbled] = []
        line, size, counted, done = self._line, len(data), 0, 0
        find, append = data.find, records.append
        while (at := find(_TOKEN, done)) >= 0:
            done = at + _TOKEN_BYTES
            line += data.count(b"\n", counted, at)
            counted = at
            end = stop = find(b"\n", done, done + _MAX_RECORD_BYTES)
            if end < 0:
                stop = min(size, done + _MAX_RECORD_BYTES)
            following = find(_TOKEN, done, stop) if stop - done > _USUAL_RECORD_BYTES else -1
            raw = data[done : stop if following < 0 else following]
            try:  # the record ends at the end of the line, or in a long line at the next token
                event = _DECODE(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                raw = data[done:stop]
                if end < 0 and stop == size and not final:
                    done = at
                    break
                record, length = _record(raw, line)
                records += [record] if record else []
                if isinstance(record, Event) and (reason := _ambiguity(raw[:length])):
                    append(Garbled(line, _quoted(raw), reason))
                done += length
            else:
                _SET(event, "line", line)
                append(_with_new_names(event) if event.key in _RENAMED else event)
                value, names = event.value, 6 + len(event.metadata)
                if type(value) is dict:
                    names += len(value)
                if (raw.count(b":") != names or raw[:18] != _USUAL_START) and (reason := _ambiguity(raw)):
                    append(Garbled(line, _quoted(raw), reason))
                done += len(raw)
            counted = done  # a record has no newline
        else:
            done = max(done, size - _TOKEN_BYTES + 1)  # a token may begin in these bytes
        self._line = line + data.count(b"\n", counted, done)
        self._rest = data[done:]
        return records


_DECODE = msgspec.json.Decoder(Event).decode
_SET = msgspec.structs.force_setattr
_DECODER = json.JSONDecoder()
_USUAL_START = b' {"namespace": "",'
"""A record with this start (18 bytes) and as many colons as names has no repeated name, and no token in a text."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError if it has a name twice."""
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError(f"{codec.repeated(pairs)!r:.40} occurs twice in the record")
    return named


_STRICT = json.JSONDecoder(object_pairs_hook=_once)


def _ambiguity(raw: bytes) -> str:
    """Return why two programs may read a record differently; empty if they cannot.

    Of a repeated name some keep the first value and some the last. MLPerf's parser starts a line at its last token.
    """
    if raw.find(_TOKEN + b" ") >= 0:
        return f"a text of the record contains {_TOKEN.decode()}"
    try:
        _STRICT.raw_decode(raw.decode(errors="replace").lstrip())
    except (ValueError, RecursionError) as error:
        return str(error) if isinstance(error, ValueError) else ""
    return ""


def _record(raw: bytes, line: int) -> tuple[Event | Garbled | None, int]:
    """Return the record after a token, up to the end of its line, and its length in bytes.

    None for a token in other text, as in `grep ':::MLLOG'`: neither a blank nor a brace follows it.
    """
    body = raw.lstrip(b" \t")
    blanks = len(raw) - len(body)
    if not body.startswith(b"{"):
        mention = body and not blanks
        return (None if mention else Garbled(line, _quoted(raw), "not a JSON object")), 0
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = body.decode("latin-1")  # one byte per character, so that lengths agree; strings are corrected below
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
    """Return the record as an event; ValueError names what is missing or wrong."""
    if missing := [name for name in Event.__struct_fields__[:-1] if name not in record]:
        raise ValueError(f"the record has no {', '.join(missing)}")
    time_ms, event_type, key, value, metadata = (record[name] for name in Event.__struct_fields__[:-1])
    if not is_number(time_ms):
        raise ValueError(f"time_ms is {time_ms!r:.40}, but must be a number of milliseconds")
    if not isinstance(key, str) or not isinstance(event_type, str):
        raise ValueError("key or event_type is not a text")
    if not isinstance(metadata, dict):
        raise ValueError(f"metadata is {metadata!r:.40}, but must be an object")
    return _with_new_names(Event(int(time_ms), event_type, key, value, metadata, line))


_RENAMED = {*mllog.OLD_KEYS, *mllog.OLD_METADATA}


def _with_new_names(event: Event) -> Event:
    """Return the event with the current names of keys and metadata that earlier versions wrote."""
    key = mllog.OLD_KEYS.get(event.key, event.key)
    names = mllog.OLD_METADATA.get(key, {})
    metadata = {names.get(name, name): value for name, value in event.metadata.items()}
    return msgspec.structs.replace(event, key=key, metadata=metadata)


def system(path: Path | str) -> dict[str, Any]:
    """Return the SYSJSON record that MLPerf's run scripts print before a trial; empty if there is none."""
    with suppress(OSError), regular_files.opened(path, follows_links=True) as file:
        head = file.read(_SYSTEM_WITHIN_BYTES)
        for mark in re.finditer(rb":::SYSJSON\s*(\{.*)", head):
            with suppress(ValueError, RecursionError):
                record = dict(_DECODER.raw_decode(mark[1].decode(errors="replace"))[0])
                json.dumps(record, allow_nan=False)
                return record
    return {}


def checksums(path: Path | str, sizes: Collection[int]) -> tuple[dict[int, str], bytes]:
    """Return the SHA-256 of the first `size` bytes of a file, by size, and the bytes after the largest size.

    At most as many bytes are returned as a record may have. A size above the file's has no checksum.

    Raises:
        OSError: the file cannot be read.
    """
    checksums, whole, done = {}, hashlib.sha256(), 0
    with regular_files.opened(path, follows_links=True) as file:
        for size in sorted(size for size in sizes if size >= 0):
            while done < size and (chunk := file.read(min(_CHUNK_BYTES, size - done))):
                whole.update(chunk)
                done += len(chunk)
            if done == size:
                checksums[size] = whole.hexdigest()
        return checksums, file.read(_MAX_RECORD_BYTES)


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value from a log is a finite number that fits into 64 bits; true and false are not numbers."""
    return (type(value) is float or type(value) is int) and -_BIGGEST <= value <= _BIGGEST


def printable(text: str) -> str:
    """Return text from a log without terminal control characters and line breaks."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def clean(text: str) -> str:
    """Return text from a log that is safe to show: no secrets, no terminal control characters, no line breaks."""
    return printable(masking.masked(text))
