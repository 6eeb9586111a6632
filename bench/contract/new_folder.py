"""New folders that are there as a whole or not at all. Standard library only: ranks use it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def existing(folder: Path) -> Iterator[None]:
    """Make a folder and its parents unless they are there; if the block fails, those that were made are gone again."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with suppress(OSError):  # somebody has put something there
                path.rmdir()
        raise


@contextmanager
def appearing(folder: Path, *, part: Path | None = None) -> Iterator[Path]:
    """Yield a folder that takes its name when the block is done; if the block fails, nothing is left of it.

    `part` is what it is called meanwhile; what lies there already is of a process that was killed, and is removed.
    """
    part = part or folder.with_name(f"{folder.name}.part")
    with existing(part.parent):
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            yield part
            part.rename(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
