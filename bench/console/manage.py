"""Show what `rerun` changes, and what `rm` and `gc` delete."""

import time
from collections.abc import Sequence

from bench.report.tables import TextTable
from bench.runs.folder import short
from bench.runs.removal import Removable

_SHORT = 48
"""Characters of a value that are shown."""


def rerun_sheet(name: str, differences: Sequence[tuple[str, str, str]]) -> TextTable:
    """Return how a run differs from the earlier one: settings and versions, their values then and now."""
    rows = [("run", name, "new"), *((key, _cut(before), _cut(now)) for key, before, now in differences)]
    caption = "" if differences else "nothing differs: the same settings, version and commit"
    return TextTable("what differs", rows, columns=("setting", "then", "now"), caption=caption)


def _cut(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


def removal_sheet(title: str, removable: Sequence[Removable], *, why_none: str) -> TextTable:
    """Return what is to be deleted, with its size and its age."""
    now_s = time.time()
    rows = [
        (short(one.path), one.what, f"{one.bytes / 2**20:,.1f}", f"{max(0.0, now_s - one.changed_s) / 86400:.0f}")
        for one in removable
    ]
    caption = f"{len(rows)} to delete, {sum(one.bytes for one in removable) / 2**20:,.1f} MiB" if rows else why_none
    return TextTable(title, rows, columns=("path", "what", "MiB", "age (days)"), caption=caption)
