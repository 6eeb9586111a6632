"""What a run keeps of the image that it ran in, and whether a file is that image; most images are never read for it."""

from pathlib import Path
from typing import Any

from bench.contract import file_content
from bench.contract.plan_paths import expanded
from bench.images import store


def of(image: str) -> dict[str, Any]:
    """Return an image's name in the plan, its file as it lies there now, and the digest in its record.

    The digest is None where no record fits the file; for a registry reference there is only the name.
    """
    path = Path(expanded(image) or "")
    if not path.is_file():
        return {"name": image}
    record, file = store.recorded(path), path.resolve()
    fits = record is not None and (record.file, record.size_bytes) == (file.name, path.stat().st_size)
    digest = record.sha256 if record is not None and fits else None
    return {"name": image, "file": str(file), "sha256": digest, **_place(file)}


def is_unchanged(known: dict[str, Any]) -> bool | None:
    """Return whether an image's file is the one that `of` found; None where that cannot be known here.

    It is read only if its size, inode or time of change is another one.
    """
    path = Path(str(known.get("file") or ""))
    if not path.is_file() or "bytes" not in known:
        return None
    now = _place(path)
    if all(known.get(name) == value for name, value in now.items()):
        return True
    if known["bytes"] != now["bytes"]:
        return False
    return file_content.sha256(path) == str(known["sha256"]) if known.get("sha256") else None


def _place(path: Path) -> dict[str, int]:
    about = path.stat()
    return {"bytes": about.st_size, "inode": about.st_ino, "mtime_ns": about.st_mtime_ns}
