"""What a node that does not share the run folder sends to the one that leads: ranks' outputs, facts, adapters."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bench.contract import run_files
from bench.errors import BenchError

PART_BYTES = 2**19
UNFINISHED = ".part"
"""What rank 0 takes off a folder's name once it is whole; that of another node still has it."""
TAKEN = (run_files.RANK_LOGS, run_files.FACTS, run_files.adapters("*"))
"""The folders that are taken from other nodes."""
Stamps = dict[Path, tuple[int, int]]
"""Size and time of change of files, by which one knows those that are new."""


def stamps(folder: Path) -> Stamps:
    """Return what lies in a node's own run folder now, of what the lead takes."""
    found: Stamps = {}
    for pattern in TAKEN:
        for place in folder.glob(pattern):
            for path in (place, *place.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
    return found


def parts(folder: Path, known: Stamps) -> Iterator[dict[str, Any]]:
    """Yield the files that are new, or have changed, since `known`, in parts, and make them known."""
    for path, stamp in stamps(folder).items():
        if known.get(path) == stamp:
            continue
        known[path] = stamp
        name = path.relative_to(folder).as_posix()
        with path.open("rb") as file:
            offset = 0
            while data := file.read(PART_BYTES):
                yield {"name": name, "offset": offset, "data": base64.b64encode(data).decode()}
                offset += len(data)


def take(folder: Path, message: dict[str, Any]) -> None:
    """Write a part of a file that another node has sent.

    Raises:
        BenchError: it names no file that the lead takes.
    """
    path = _place(folder, str(message["name"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if message["offset"] else os.O_TRUNC)
    with os.fdopen(os.open(path, mode, 0o644), "wb") as file:
        file.seek(int(message["offset"]))
        file.write(base64.b64decode(message["data"]))


def _place(folder: Path, name: str) -> Path:
    """Return where a node's file goes: into one of the folders that are taken, by a path without .. and links."""
    first, *rest = PurePosixPath(name).parts
    first = first.removesuffix(UNFINISHED)
    is_taken = bool(rest) and any(PurePosixPath(first).match(pattern) for pattern in TAKEN)
    parent = Path(first, *rest).parent
    if not is_taken or parent.is_absolute() or (folder / parent).resolve() != folder.resolve() / parent:
        raise BenchError(f"a node sends {name!r:.80}", where=str(folder), fix="see who else uses this run's token")
    return folder / parent / rest[-1]
