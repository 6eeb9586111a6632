"""A file system on which one operation fails, and what a folder holds, to compare it before and after."""

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

_CHANGING = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")
"""Audit events of what changes a file system; os.rename is raised by os.replace too, os.remove by os.unlink."""


@dataclass
class FailingDisk:
    """Operations below a folder are counted, and the one with this number fails; 0 is the first."""

    root: Path
    fails_at: int
    seen: int = 0
    failed: str = ""
    """What was refused; empty while nothing was."""

    def count(self, what: str) -> None:
        if self.seen == self.fails_at:
            self.failed = what
        self.seen += 1
        if self.failed and self.seen == self.fails_at + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), what)


_failing: list[FailingDisk] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    """Count what opens a file for writing, makes, renames or removes one: pathlib, shutil and open all come by here."""
    if not _failing or not (event == "open" or event in _CHANGING):
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        return
    disk = _failing[-1]
    paths = [os.fspath(path) for path in args[:2] if isinstance(path, str | bytes | os.PathLike)]
    if any(os.path.abspath(os.fsdecode(path)).startswith(str(disk.root)) for path in paths):
        disk.count(f"{event} {os.fsdecode(paths[0])}")


@cache
def _listen() -> None:
    """Hear of each operation of this process, once and for all; outside of `failing` nothing is done about it."""
    sys.addaudithook(_audit)


@contextmanager
def failing(root: Path, at: int) -> Iterator[FailingDisk]:
    """Let operation number `at` below a folder fail; fsync counts in every folder."""
    disk, real = FailingDisk(root.absolute(), at), os.fsync
    _listen()

    def fsync(descriptor: int) -> None:
        disk.count("fsync")
        real(descriptor)

    _failing.append(disk)
    try:
        with mock.patch("os.fsync", fsync):
            yield disk
    finally:
        _failing.pop()


def contents(root: Path) -> dict[str, tuple[str, bytes]]:
    """Return each path below a folder, its mode, and its bytes or its target; files that only serve as locks are left
    out."""
    operations = {}
    for path in sorted(root.rglob("*")):
        mode = stat.filemode(path.lstat().st_mode)
        content = bytes(path.readlink()) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        if not path.name.endswith(".lock"):
            operations[str(path.relative_to(root))] = (mode, content)
    return operations
