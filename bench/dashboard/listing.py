"""The runs below a folder, each by an id that is not a path: a request can name only a run that is listed."""

import hashlib
import os
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.history import store
from bench.history.regression import TaskHistory, histories
from bench.runs import folder as folders
from bench.runs import names, tags
from bench.runs import run as runs
from bench.runs import summary as summaries
from bench.runs.run import Run
from bench.runs.summary import Summary

LISTED_S, QUERIED_S = 2.0, 10.0
"""Seconds until the folder is listed again, and until the backends are queried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One run of the list."""

    id: str
    name: str
    """The path of its folder below the root."""
    run: Run
    summary: Summary
    other_writers: str
    """Why the folder is not this user's alone; empty if it is."""

    @property
    def folder(self) -> Path:
        return self.run.folder


@dataclass(slots=True)
class Listing:
    """The runs of a folder, as they were a moment ago."""

    root: Path
    left_out: int = 0
    """How many folders are not shown, since their names contain control characters."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _runs: tuple[Listed, ...] = ()
    _listed_s: float = -QUERIED_S
    _summaries: dict[Path, tuple[str, Summary]] = field(default_factory=dict)
    _history: store.Known = field(default_factory=dict)

    def runs(self) -> tuple[Listed, ...]:
        """Return all runs, the newest first."""
        with self._lock:
            since_s = time.monotonic() - self._listed_s
            if since_s > (QUERIED_S if any(one.run.jobs for one in self._runs) else LISTED_S):
                self._runs = self._read()
                self._listed_s = time.monotonic()
            return self._runs

    def find(self, id: str) -> Listed | None:
        return next((one for one in self.runs() if one.id == id), None)

    def histories(self) -> list[TaskHistory]:
        """Return the history of each task; what is read is kept in memory, and nothing is written."""
        with self._lock:
            return histories(store.trials(self.root, memory=self._history))

    def _read(self) -> tuple[Listed, ...]:
        parents = (self.root, *(parent for parent in sorted(self.root.glob(f"{names.STUDIES}/*")) if parent.is_dir()))
        every = [folder for parent in parents for folder in names.below(parent)]
        shown = [folder for folder in every if names.unprintable(folder) is None]
        self.left_out = len(every) - len(shown)
        listed = [self._listed(run) for run in runs.in_folders(shown, must_answer=False)]
        self._summaries = {one.folder: self._summaries[one.folder] for one in listed}
        return tuple(sorted(listed, key=lambda one: (one.summary.started, one.name), reverse=True))

    def _listed(self, run: Run) -> Listed:
        name = str(run.folder.relative_to(self.root))
        stamp = store.stamp(run.folder)
        if self._summaries.get(run.folder, ("",))[0] != stamp:
            self._summaries[run.folder] = stamp, summaries.summary(run.folder)
        return Listed(
            id=hashlib.sha256(os.fsencode(name)).hexdigest()[:16],
            name=name,
            run=run,
            summary=replace(self._summaries[run.folder][1], tags=tags.read(run.folder)),
            other_writers=folders.other_writers(run.folder),
        )
