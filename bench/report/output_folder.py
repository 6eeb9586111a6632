"""Write the files of a report into a folder: all of them or none, and over nothing that is not ours."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.contract.atomic_files import existing
from bench.errors import ConfigError

MARK = '<meta name="generator" content="runstop'
"""Stands in every page of ours, so that no other is overwritten."""


def write(out: Path, make: Callable[[Path], None], *, page: str, names: re.Pattern[str]) -> None:
    """Have `make` write into an empty folder, and move what it wrote to `out`.

    `page` is the file that carries our mark; `names` are those of all files that such a report may hold.

    Raises:
        ConfigError: the folder cannot be made or written, or holds files of these names that are not ours.
    """
    try:
        with existing(out):
            _require_ours(out, page, names)
            with tempfile.TemporaryDirectory(prefix=".part-", dir=out, ignore_cleanup_errors=True) as scratch:
                part, replaced = Path(scratch, "new"), Path(scratch, "replaced")
                part.mkdir()
                replaced.mkdir()
                make(part)
                _move_all(part, out, replaced, page=page)
    except OSError as error:
        what = f"the report cannot be written: {error.strerror}"
        raise ConfigError(what, where=str(out), fix="name another folder") from error


def _move_all(part: Path, out: Path, replaced: Path, *, page: str) -> None:
    """Give all files their place, and what they replace another; if one cannot be moved, all of them go back."""
    moved: list[tuple[Path, Path]] = []
    try:
        for path in sorted(part.iterdir(), key=lambda path: path.name != page):  # the page says whose the rest is
            moves = [(path, out / path.name)]
            if moves[0][1].exists():
                moves.insert(0, (out / path.name, replaced / path.name))
            for here, there in moves:
                here.rename(there)
                moved.append((here, there))
    except BaseException:
        for here, there in reversed(moved):
            there.rename(here)
        raise


def _require_ours(out: Path, page: str, names: re.Pattern[str]) -> None:
    """Raise ConfigError for files of the names that a report has, unless a page of ours lies beside them."""
    taken = sorted(path.name for path in out.iterdir() if names.fullmatch(path.name))
    if page in taken and MARK in (out / page).read_text(errors="replace"):
        return
    if taken:
        shown = ", ".join(taken)
        raise ConfigError(f"{shown} not of our making, and not overwritten", where=str(out), fix="name another folder")
