"""Send the files of a node without a shared run folder to the lead node: outputs of ranks, facts, adapters."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from bench.contract import run_files
from bench.errors import BenchError

PART_BYTES = 2**19
UNFINISHED = ".part"
"""The suffix of an unfinished folder. Rank 0 removes it at the end; on other nodes the folder keeps it."""
SENT_FOLDERS = (run_files.RANK_LOGS, run_files.FACTS, run_files.adapters("*"))
"""The folders that other nodes send to the lead."""
Stamps = dict[Path, tuple[int, int]]
"""Size and modification time of files, to detect new and changed ones."""


def stamps(folder: Path) -> Stamps:
    """Return the stamps of all files in a node's own run folder that are sent to the lead."""
    current: Stamps = {}
    for pattern in SENT_FOLDERS:
        for place in folder.glob(pattern):
            for path in (place, *place.rglob("*")):
                if path.is_file() and not path.is_symlink():
                    current[path] = (path.stat().st_size, path.stat().st_mtime_ns)
    return current


def parts(folder: Path, known: Stamps) -> Iterator[dict[str, Any]]:
    """Yield the files that are new or changed compared with `known`, in parts, and add them to `known`."""
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


def write(folder: Path, message: dict[str, Any]) -> None:
    """Write a part of a file that another node has sent.

    Raises:
        BenchError: the file is not in one of the folders that nodes send.
    """
    path = _path(folder, str(message["name"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (0 if message["offset"] else os.O_TRUNC)
    with os.fdopen(os.open(path, mode, 0o644), "wb") as file:
        file.seek(int(message["offset"]))
        file.write(base64.b64decode(message["data"]))


def _path(folder: Path, name: str) -> Path:
    """Return the path for a node's file: below one of SENT_FOLDERS, without .. and symbolic links."""
    first, *rest = PurePosixPath(name).parts
    first = first.removesuffix(UNFINISHED)
    is_sent = bool(rest) and any(PurePosixPath(first).match(pattern) for pattern in SENT_FOLDERS)
    parent = Path(first, *rest).parent
    if not is_sent or parent.is_absolute() or (folder / parent).resolve() != folder.resolve() / parent:
        what = f"a node sent a file with the path {name!r:.80}, which is not a file of a run"
        raise BenchError(what, where=str(folder), fix="stop the other programs that use the RUNSTOP_TOKEN of this run")
    return folder / parent / rest[-1]
