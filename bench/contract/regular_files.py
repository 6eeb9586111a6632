"""Open and read files that another user may have written. Standard library only: ranks import it.

A pipe in the place of a file blocks the process that opens it, a device gives bytes without end, and a symbolic link
leads to any file of the reader. So only regular files are opened, and their size is limited.
"""

import errno
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MAX_BYTES = 1 << 28
"""Of a file that is read into memory: many times the largest plan or ledger."""
MAX_LOG_BYTES = 1 << 33
"""Of a log, which is read in parts: 8 GiB take about 7 s."""


def opened(path: Path | str, *, follows_links: bool = False, max_bytes: int | None = None) -> FileIO:
    """Open a regular file for reading; never wait for another process.

    Raises:
        OSError: it cannot be opened, is not a regular file, is a symbolic link (unless `follows_links`), or has more
            than `max_bytes`.
    """
    if follows_links:
        _require_regular(Path(path).stat(), path)  # opening a device can have effects
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    try:
        file = FileIO(os.open(path, flags), "rb")
    except OSError as error:
        if error.errno == errno.ELOOP and Path(path).is_symlink():
            raise OSError(errno.ELOOP, "the file is a symbolic link, which is not allowed here", str(path)) from error
        raise
    try:
        status = os.fstat(file.fileno())
        _require_regular(status, path)
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(
                errno.EFBIG,
                f"the file has {status.st_size:,} bytes, but runstop reads at most {max_bytes:,} bytes",
                str(path),
            )
    except BaseException:
        file.close()
        raise
    return file


def _require_regular(status: os.stat_result, path: Path | str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "this path is not a regular file", str(path))


def chunks(path: Path | str, size: int) -> Iterator[bytes]:
    """Yield the parts of a log, which may be a symbolic link to a file; OSError as `opened`, with MAX_LOG_BYTES."""
    done = 0
    with opened(path, follows_links=True, max_bytes=MAX_LOG_BYTES) as file:
        while chunk := file.read(size):
            done += len(chunk)
            if done > MAX_LOG_BYTES:  # files of /proc have a size of 0
                raise OSError(
                    errno.EFBIG, f"the file is too long: runstop reads at most {MAX_LOG_BYTES:,} bytes", str(path)
                )
            yield chunk


def read_bytes(path: Path | str, *, max_bytes: int = MAX_BYTES, follows_links: bool = False) -> bytes:
    """Return the content of a regular file; OSError as `opened`."""
    with opened(path, max_bytes=max_bytes, follows_links=follows_links) as file:
        data = bytearray()
        while len(data) <= max_bytes and (chunk := file.read(1 << 20)):  # it may grow
            data += chunk
        return bytes(data[:max_bytes])


def read_text(
    path: Path | str, *, errors: str = "strict", max_bytes: int = MAX_BYTES, follows_links: bool = False
) -> str:
    """Return the text of a regular file in UTF-8; OSError as `opened`, UnicodeDecodeError."""
    return read_bytes(path, max_bytes=max_bytes, follows_links=follows_links).decode(errors=errors)


def is_regular(path: Path) -> bool:
    """Return whether the path is a regular file, and not a symbolic link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def keep_others_from_writing() -> int:
    """Change the umask of this process, so that only this user can write to new files; return the previous umask.

    Processes that it starts inherit it.
    """
    before = os.umask(OTHERS_WRITE)
    os.umask(before | OTHERS_WRITE)
    return before
