"""MLPerf's log lines: write them, and read them back out of whatever else a job printed.

A line is `:::MLLOG {json}`. Writing is strict: one file per trial, one record per line, nothing JSON cannot hold. Reading
is not: the token may stand anywhere in a line, several times, cut off or glued to other output.
"""

import gc
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from bench.errors import ConfigError, LogError

CACHE_CLEAR = "cache_clear"
INIT_START, INIT_STOP = "init_start", "init_stop"
RUN_START, RUN_STOP = "run_start", "run_stop"
BLOCK_START, BLOCK_STOP = "block_start", "block_stop"
EVAL_START, EVAL_STOP, EVAL_ACCURACY = "eval_start", "eval_stop", "eval_accuracy"
TRAIN_LOSS, TRACKED_STATS = "train_loss", "tracked_stats"

SUBMISSION_BENCHMARK, SUBMISSION_DIVISION = "submission_benchmark", "submission_division"
SUBMISSION_ORG, SUBMISSION_PLATFORM, SUBMISSION_STATUS = "submission_org", "submission_platform", "submission_status"

TARGET_ACCURACY, SEED = "target_accuracy", "seed"
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = "global_batch_size", "micro_batch_size"
GRADIENT_ACCUMULATION_STEPS = "gradient_accumulation_steps"
TRAIN_SAMPLES, EVAL_SAMPLES = "train_samples", "eval_samples"
OPT_BASE_LEARNING_RATE = "opt_base_learning_rate"
OPT_LEARNING_RATE_TRAINING_STEPS = "opt_learning_rate_training_steps"
OPT_LEARNING_RATE_WARMUP_FACTOR = "opt_learning_rate_warmup_factor"
OPT_ADAMW_WEIGHT_DECAY, OPT_GRADIENT_CLIP_NORM = "opt_adamw_weight_decay", "opt_gradient_clip_norm"
LORA_RANK, LORA_ALPHA = "lora_rank", "lora_alpha"
PRECISION_IN_LINEAR = "lowest_numerical_precision_in_linear"
PRECISION_IN_ATTN = "lowest_numerical_precision_in_attn"
PRECISION_IN_COMM = "lowest_numerical_precision_in_comm"
TENSOR_PARALLELISM, PIPELINE_PARALLELISM = "tensor_parallelism", "pipeline_parallelism"
CONTEXT_PARALLELISM, EXPERT_PARALLELISM = "context_parallelism", "expert_parallelism"
CONFIG_FILENAME = "config_filename"

SUCCESS, ABORTED = "success", "aborted"
"""What run_stop's metadata.status may say."""

_TOKEN = b":::MLLOG"
_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Event(NamedTuple):
    """One record, and the 1-based line of the file that it stands in."""

    time_ms: int
    event_type: str
    key: str
    value: Any
    metadata: dict[str, Any]
    line: int


@dataclass(frozen=True, slots=True)
class Garbled:
    """A token that no readable record follows."""

    line: int
    text: str
    reason: str


class Writer:
    """The log of one trial; safe to use from several threads and from signal handlers. None, for a rank that does not
    write the log, takes everything and keeps nothing.

    Raises:
        ConfigError: the file exists: a trial that is started twice never adds to the log of the first.
    """

    def __init__(self, path: Path | None) -> None:
        try:  # unbuffered: a line is one write
            self._file = FileIO(os.devnull, "w") if path is None else FileIO(path, "x")
        except FileExistsError as error:
            raise ConfigError(
                "CFG-05: this trial has a log already, and a second start never adds to it",
                where=str(path),
                fix="start in a new folder, or move the old log away",
            ) from error
        self._lock = threading.RLock()
        self._started = self._stopped = False

    def event(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write that something is so at this moment.

        Raises:
            ValueError: JSON cannot hold the value (NaN, infinity, a tensor); nothing was written.
            OSError: the line could not be written, as on a full disk.
        """
        self._write("POINT_IN_TIME", key, value, metadata)

    def start(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write that something begins; raises like `event`."""
        self._write("INTERVAL_START", key, value, metadata)

    def stop(self, key: str, value: Any = None, /, **metadata: Any) -> None:
        """Write that something ends; raises like `event`. For run_stop there is `finish`."""
        self._write("INTERVAL_END", key, value, metadata)

    def finish(self, status: str, **metadata: Any) -> bool:
        """Return whether this call wrote run_stop: only the first one after run_start does, and none after `close`."""
        with self._lock:
            if not self._started or self._stopped or self._file.closed:
                return False
            self._stopped = True  # before the write: a signal handler may come in between
            try:
                self._append("INTERVAL_END", RUN_STOP, None, metadata | {"status": status})
            except BaseException:
                self._stopped = False
                raise
            return True

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        if key == RUN_STOP:
            raise ValueError("run_stop is written once, by finish()")
        with self._lock:
            self._append(event_type, key, value, metadata)
            self._started |= key == RUN_START

    def _append(self, event_type: str, key: str, value: Any, metadata: dict[str, Any]) -> None:
        record = {
            "namespace": "",
            "time_ms": time.time_ns() // 1_000_000,
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": _caller() | metadata,
        }
        try:
            line = b"%s %s\n" % (_TOKEN, json.dumps(record, allow_nan=False).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{key} = {value!r} with {metadata!r} cannot be logged: {error}") from error
        while line:  # a disk that fills up takes part of a line, then raises
            line = line[self._file.write(line) :]


def _caller() -> dict[str, Any]:
    """Return where the log was called from: file, relative to the folder that holds `bench/`, and line."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back:
        frame = frame.f_back
    file = os.path.abspath(frame.f_code.co_filename)
    inside = file.startswith(_PACKAGE_ROOT + os.sep)
    name = os.path.relpath(file, _PACKAGE_ROOT) if inside else os.path.basename(file)
    return {"file": name, "lineno": frame.f_lineno}


def read(path: Path | str) -> tuple[list[Event], list[Garbled]]:
    """Return every record of a log in the order of the file; no content makes this fail.

    Text between records costs a search for the token and a count of newlines, and no memory.

    Raises:
        LogError: the file cannot be opened.
    """
    found: list[Event | Garbled] = []
    scanner = Scanner()
    try:
        with FileIO(path) as file, _no_collection():
            while chunk := file.read(_CHUNK_BYTES):
                found += scanner.feed(chunk)
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise LogError(
            f"the log cannot be read: {reason}", where=str(path), fix="name the result_K.txt of a trial"
        ) from error
    found += scanner.finish()
    return [r for r in found if isinstance(r, Event)], [r for r in found if isinstance(r, Garbled)]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Records hold no cycles: looking for some, again and again while they pile up, is a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Follower:
    """Reads a log while it is written. Each poll costs what was added since the one before; garbled records are skipped.

    A file that is cut off or overwritten is read again from its start, and one that is replaced is first read to its end.
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
        with suppress(OSError):  # not there yet, or not ours to read yet
            self._file = os.open(self._path, os.O_RDONLY)
        return self._file is not None

    def _is_replaced(self) -> bool:
        """Return whether the path now names another file; while it names none, the one that is open may still grow."""
        assert self._file is not None
        with suppress(OSError):
            return not os.path.samestat(os.fstat(self._file), self._path.stat())
        return False

    def _added(self) -> "list[Event | Garbled]":
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

    def feed(self, chunk: bytes) -> "list[Event | Garbled]":
        """Return the records that this chunk completes."""
        return self._scan(self._rest + chunk if self._rest else chunk, final=False)

    def finish(self) -> "list[Event | Garbled]":
        """Return what the last line holds, which no newline ends."""
        return self._scan(self._rest, final=True)

    def _scan(self, data: bytes, *, final: bool) -> "list[Event | Garbled]":
        found: list[Event | Garbled] = []
        counted = done = 0
        at = data.find(_TOKEN)
        text = data.decode() if at >= 0 and data.isascii() else ""
        while at >= 0:
            self._line += data.count(b"\n", counted, at)
            counted, done = at, at + len(_TOKEN)
            record: Event | Garbled | None
            record, end = _plain_record(text, done, self._line)
            if record is None:
                limit = min(len(data), done + _MAX_RECORD_BYTES)
                newline = data.find(b"\n", done, limit)
                if newline < 0 and limit == len(data) and not final:
                    self._rest = data[at:]
                    return found
                record, length = _record(data[done : limit if newline < 0 else newline], self._line)
                end = done + length
            if record is not None:
                found.append(record)
            done = end
            at = data.find(_TOKEN, done)
        done = max(done, len(data) - len(_TOKEN) + 1)  # a token may begin in these bytes
        self._line += data.count(b"\n", counted, done)
        self._rest = data[done:]
        return found


_CHUNK_BYTES = 1 << 18
"""Small enough to stay in a core's cache between the search and the count."""
_MAX_RECORD_BYTES = 1 << 20
"""Longer lines exist, as progress bars without a newline; longer records do not."""
_SCAN = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
"""(text, index) -> (value, end): what raw_decode wraps."""


def _plain_record(text: str, start: int, line: int) -> tuple[Event | None, int]:
    """Return the record after a token and its end, if it is just that: ` {…}` within a line of ASCII; the usual case."""
    if not text.startswith(" {", start):
        return None, start
    try:
        record, end = _SCAN(text, start + 1)
        return (_event(record, line), end) if text.find("\n", start, end) < 0 else (None, start)
    except (ValueError, RecursionError, StopIteration):
        return None, start


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
        record, end = _SCAN(text, 0)
        length = blanks + (end if len(text) == len(body) else len(text[:end].encode()))
        if len(text) == len(body) and not text.isascii():
            record = json.loads(body[:end].decode(errors="replace"))
        return _event(record, line), length
    except (ValueError, RecursionError, StopIteration) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error) or "a value is missing"
        return Garbled(line, _quoted(raw), reason), 0


def _quoted(raw: bytes) -> str:
    return (_TOKEN + raw[:120]).decode(errors="replace").rstrip()


def _event(record: Any, line: int) -> Event:
    """Return the record as an event; ValueError says what it lacks."""
    try:
        time_ms, key, metadata = record["time_ms"], record["key"], record["metadata"]
        event_type, value = record["event_type"], record["value"]
    except KeyError:
        missing = [name for name in Event._fields[:-1] if name not in record]
        raise ValueError(f"no {', '.join(missing)}") from None
    if type(time_ms) is not int or not -(2**63) < time_ms < 2**63:
        if not is_number(time_ms):
            raise ValueError(f"time_ms is {time_ms!r:.40}, not a number of milliseconds")
        time_ms = int(time_ms)
    if type(key) is not str or type(event_type) is not str:
        raise ValueError("key and event_type are not both text")
    if type(metadata) is not dict:
        raise ValueError(f"metadata is {metadata!r:.40}, not an object")
    return _NEW(Event, (time_ms, event_type, key, value, metadata, line))


_NEW = tuple.__new__
"""Event._make without its two calls in between: a log may have a million records."""


def system(path: Path | str) -> dict[str, Any]:
    """Return the SYSJSON record that MLPerf's run scripts print ahead of a trial; empty where there is none."""
    with suppress(OSError), FileIO(path) as file:
        head = file.read(_SYSTEM_WITHIN_BYTES).decode(errors="replace")
        for mark in re.finditer(r":::SYSJSON\s*(?=\{)", head):
            with suppress(ValueError, RecursionError, StopIteration):
                return dict(_SCAN(head, mark.end())[0])
    return {}


_SYSTEM_WITHIN_BYTES = 1 << 20


def is_number(value: Any) -> bool:
    """Return whether a value read from a log is a finite number of a size one can calculate with; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def printable(text: str) -> str:
    """Return text from a log without what would steer a terminal or break a line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
