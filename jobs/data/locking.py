"""Let one process at a time prepare what lies in DATADIR."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".prepare.lock"


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Wait until no other process prepares anything in this folder, and keep others waiting meanwhile."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
