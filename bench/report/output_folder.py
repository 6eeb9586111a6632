"""Write the files of a report into a folder: all or none, without overwriting files that runstop did not write."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.contract.atomic_files import existing
from bench.contract.run_files import LEDGER
from bench.errors import ConfigError

MARK = '<meta name="generator" content="runstop'
"""Marks every page of runstop, so that other pages are not overwritten."""


def write(out: Path, make: Callable[[Path], None], *, page: str, names: re.Pattern[str]) -> None:
    """Call `make` with an empty folder, and move the files from there to `out`.

    `page` is the file with runstop's mark; `names` matches the names of all files of such a report.

    Raises:
        ConfigError: the folder cannot be created or written, or has files of these names that runstop did not write.
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
        raise ConfigError(what, where=str(out), fix="choose another folder with -o") from error


def _move_all(part: Path, out: Path, replaced: Path, *, page: str) -> None:
    """Move all files to `out`, and the files they replace to `replaced`; undo all moves if one fails."""
    moved: list[tuple[Path, Path]] = []
    try:
        for path in sorted(
            part.iterdir(), key=lambda path: path.name != page
        ):  # the page first: it marks the other files as ours
            moves = [(path, out / path.name)]
            if moves[0][1].exists():
                moves.insert(0, (out / path.name, replaced / path.name))
            for source, target in moves:
                source.rename(target)
                moved.append((source, target))
    except BaseException:
        for source, target in reversed(moved):
            target.rename(source)
        raise


def _require_ours(out: Path, page: str, names: re.Pattern[str]) -> None:
    """Raise ConfigError for a folder of runs, and for existing files with names of a report that no runstop wrote."""
    if any(out.glob(f"*/{LEDGER}")):
        what, fix = "this is a folder of runs, not a folder for a report", f"choose a subfolder: -o {out / 'report'}"
        raise ConfigError(what, where=str(out), fix=fix)
    taken = sorted(path.name for path in out.iterdir() if names.fullmatch(path.name))
    if page in taken and MARK in (out / page).read_text(errors="replace"):
        return
    if taken:
        shown = ", ".join(taken)
        raise ConfigError(
            f"the folder has files that runstop did not write and does not overwrite: {shown}",
            where=str(out),
            fix="choose another folder with -o",
        )
