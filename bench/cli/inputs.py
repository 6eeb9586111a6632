"""Logs as a user names them: files, pipes, `-` for stdin, and files that gzip packed."""

import gzip
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from bench.errors import LogError

STDIN = Path("-")
_GZIP_MAGIC = b"\x1f\x8b"


@contextmanager
def plain(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield each log as a file that can be read several times: what is none is copied to a temporary folder.

    Raises:
        LogError: a packed log is damaged.
    """
    with tempfile.TemporaryDirectory(prefix="runstop-") as scratch:
        yield [_plain(path, Path(scratch, str(number))) for number, path in enumerate(paths)]


def _plain(path: Path, folder: Path) -> Path:
    """Return the path itself, or that of a copy in a new folder; a file that is not there is left to the reader."""
    copy = folder / ("stdin" if path == STDIN else path.name.removesuffix(".gz"))
    folder.mkdir()
    if path == STDIN:
        _unpack(sys.stdin.buffer, copy, path)
    elif path.is_fifo() or _is_packed(path):
        with path.open("rb") as source:
            _unpack(source, copy, path)
    else:
        return path
    return copy


def _is_packed(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    except OSError:  # the reader says what is the matter
        return False


def _unpack(source: BinaryIO, copy: Path, path: Path) -> None:
    """Copy a stream to a file, unpacked if gzip packed it."""
    with copy.open("wb") as target:
        head = source.read(len(_GZIP_MAGIC))
        target.write(head)
        shutil.copyfileobj(source, target)
    if head != _GZIP_MAGIC:
        return
    packed = copy.with_name(f"{copy.name}.gz")
    copy.rename(packed)
    try:
        with gzip.open(packed) as stream, copy.open("wb") as target:
            shutil.copyfileobj(stream, target)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = f"the log cannot be unpacked: {error}"
        raise LogError(what, where=str(path), fix="pack it again with gzip, or name it unpacked") from error
    packed.unlink()
