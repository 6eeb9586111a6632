"""JSON files of a run folder, replaced in one step."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


def write(path: Path, content: Any) -> None:
    """Replace a JSON file in one step: a reader, or a crash, never meets half of it.

    Raises:
        OSError: it could not be written in full, and the file is as it was.
    """
    part = path.with_suffix(f".part{os.getpid()}")
    try:
        with part.open("w") as file:
            file.write(text(content))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def text(content: Any) -> str:
    """Return what `write` writes."""
    return json.dumps(content, indent=1) + "\n"


def read(path: Path) -> Any:
    """Return what a JSON file of ours holds; None if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(path.read_text())
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of ours; empty if it is missing or damaged."""
    found = read(path)
    return found if isinstance(found, dict) else {}
