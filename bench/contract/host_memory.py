"""The memory of this host and the limit of this process's control groups. Standard library only: ranks import it."""

import os
from contextlib import suppress
from pathlib import Path

OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def total_bytes() -> int:
    """Return the memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit_bytes() -> int | None:
    """Return the smallest memory limit of this process's control groups and of those above; None without a limit.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    limits = []
    for line in _text(OWN_GROUPS).splitlines():
        _, controllers, inside = line.split(":", 2)
        root, name = GROUPS, "memory.max"
        if controllers:  # version 1
            root, name = root / controllers, "memory.limit_in_bytes"
        group = root / inside.strip("/")
        while group.is_relative_to(root):
            limits.append(_text(group / name))
            group = group.parent
    smallest = min((int(limit) for limit in limits if limit.isdigit()), default=None)
    return smallest if smallest is not None and smallest < total_bytes() else None


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
