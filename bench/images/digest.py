"""The digest of an image's file, and what a run keeps of the image that it ran in."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from bench import masked_json
from bench.contract import atomic_files


def since_change(image: Path) -> str:
    """Return the digest of an image's file as it was read last, or read it if it has changed since, or never was."""
    state = _state(image)
    for note in _notes(image):
        known = atomic_files.read_object(note)
        if known.get("state") == state and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
    digest = atomic_files.sha256(image)
    if _state(image) == state:
        remember(image, digest)
    return digest


def remember(image: Path, digest: str) -> None:
    """Note the digest that an image's file has now; where nobody lets us, it is read again the next time."""
    for note in _notes(image):
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            masked_json.write(note, {"state": _state(image), "sha256": digest})
            return


def _state(image: Path) -> dict[str, int]:
    """Return what changes whenever somebody writes to a file, or puts another one in its place."""
    stat = image.stat()
    return {"inode": stat.st_ino, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def _notes(image: Path) -> tuple[Path, Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    own = hashlib.sha256(str(image.absolute()).encode()).hexdigest()[:16]
    return image.with_suffix(".checked"), cache / "runstop" / "images" / f"{own}.checked"
