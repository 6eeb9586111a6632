"""Delete run folders, and useless files of failed and killed runs; never a run that may be alive.

A folder is first renamed to .removed/NAME next to it, and then deleted. No search for runs looks there, so a deletion
that is interrupted leaves either the run or nothing that looks like one; `runstop gc` finishes it. Symbolic links are
deleted, and never followed.
"""

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from bench.backends import run_lock
from bench.contract import atomic_files, run_files
from bench.contract.run_files import JOB, LEDGER, PLAN, SIGNATURE, SUBMISSION
from bench.errors import BenchError, ConfigError, written
from bench.runs import names, tags
from bench.runs import run as runs
from bench.runs.folder import NOT_OTHERS, require_ours, short
from bench.runs.manifest import UNFINISHED
from bench.runs.run import Run
from bench.runs.status import Ending

REMOVED = ".removed"
"""The folder next to run folders in which they are deleted."""
_STORE_PARTS = ".history.sqlite.*"
_OF_NO_RUN = "job without runs"
_IN_USE_S = 3600.0
"""Younger files of interrupted commands may be those of commands that still run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Removable:
    """A folder or file that can be deleted."""

    path: Path
    what: str
    """Such as: failed run."""
    bytes: int
    """Disk space that it takes."""
    changed_s: float
    """When it last changed, in seconds since 1970."""


def of_run(folder: Path) -> Removable:
    """Return a run that may be deleted.

    Raises:
        ConfigError: it is not a run folder of this user, it is or may be alive, or it holds another file system.
        BenchError: its backend cannot be queried.
    """
    runs.require_run(folder)
    require_ours(folder if folder.is_symlink() else folder.resolve())
    if names.is_shared_job(folder):
        _require_no_runs(folder)
        _require_ended(runs.find(folder))
        return _removable(folder, _OF_NO_RUN)
    run = runs.find(folder)
    _require_ended(run)
    return _removable(folder, f"{run.state_name} run" if run.status else f"run: {run.state_name}")


def _require_no_runs(folder: Path) -> None:
    """Raise ConfigError if runs of a shared job exist."""
    if left := _runs_of(folder):
        what = f"this folder belongs to a job that {len(left)} runs share"
        raise ConfigError(what, where=str(folder), fix=f"remove the runs first: {', '.join(map(short, left))}")


def _runs_of(shared: Path) -> list[Path]:
    """Return the runs of a shared job that still exist."""
    known = atomic_files.read_object(shared / JOB)
    return [path for name in run_files.runs_in(known) if (path := shared.parent / name).exists()]


def _require_ended(run: Run) -> None:
    """Raise ConfigError unless it is certain that no process works on a run."""
    folder = run.folder
    if run.is_active or run_lock.driver(folder) is not None:
        state = run.state_name if run.is_active else "a process works on this run"
        fix = f"cancel the run first: runstop cancel {short(folder)}"
        raise ConfigError(f"the run is active: {state}", where=str(folder), fix=fix)
    is_final = run.status is not None and run.status.outcome is not Ending.interrupted  # an interrupted job may requeue
    if not is_final and (run.may_be_active or not run.is_queried):
        what = f"this machine cannot find out whether the run is active (state: {run.state_name})"
        fix = f"use a machine that can query the run's jobs; if the run has certainly ended: rm -r {short(folder)}"
        raise ConfigError(what, where=str(folder), fix=fix)
    if (folder / SUBMISSION).exists():
        what = "the submission of this run was interrupted, so the run may have a job"
        fix = f"run `runstop runs` to see the state of the run, then cancel the run: runstop cancel {short(folder)}"
        raise ConfigError(what, where=str(folder), fix=fix)
    if (folder.parent / names.STUDY).exists() and run_lock.driver(folder.parent) is not None:
        fix = "wait for the study, or stop it with Ctrl-C"
        raise ConfigError("a process is working on the study of this run", where=str(folder.parent), fix=fix)


def garbage(root: Path, *, older_than_days: float) -> list[Removable]:
    """Return what `gc` deletes below a folder of runs: only what is of no use, and has not changed for some days.

    - runs that failed before a trial had a result, and launches that were killed before they started, without tags, a
      note or a signature
    - incomplete checkpoints and adapters of runs that have ended
    - however old: folders of shared jobs whose runs have been deleted, partial files of the history, and interrupted
      deletions, if nothing has changed in them for an hour

    Raises:
        ConfigError: the folder does not exist.
    """
    names.require_root(root)
    before_s = time.time() - 86400 * older_than_days
    removable, leftovers = list[Removable](), list[Removable]()
    parents = [root, *sorted({path.parent for path in root.glob(f"{names.STUDIES}/*/{names.STUDY}")})]
    for parent in parents:
        every = names.below(parent)
        for run in runs.in_folders(every, must_answer=False):
            removable += _of_failed(run) or _incomplete(run)
        leftovers += _leftovers(parent)
    old = [one for one in removable if one.changed_s < before_s]
    old += [one for one in leftovers if one.changed_s < time.time() - _IN_USE_S]
    return sorted(old, key=lambda one: one.path)


def _of_failed(run: Run) -> list[Removable]:
    """Return the run if it is of no use."""
    folder = run.folder
    if (folder / SIGNATURE).exists() or tags.read(folder) != tags.Tags():
        return []
    has_failed = run.status is not None and run.status.outcome is Ending.failed
    has_results = any(outcome.is_result for outcome in run.outcomes) or any(folder.glob(run_files.RESULTS))
    has_checkpoints = any(folder.glob(f"{run_files.checkpoints('*')}/*"))
    never_began = not any(os.path.lexists(folder / name) for name in (JOB, LEDGER)) and (folder / PLAN).exists()
    if not (has_failed or never_began) or has_results or has_checkpoints:
        return []
    with suppress(BenchError, OSError):
        _require_ended(run)
        require_ours(folder.resolve())
        return [_removable(folder, "failed run" if has_failed else "launch that was killed before its start")]
    return []


def _incomplete(run: Run) -> list[Removable]:
    """Return the incomplete checkpoints and adapters of a run that has ended."""
    if run.status is None:
        return []
    patterns = (f"{run_files.checkpoints('*')}/*{UNFINISHED}", f"{run_files.adapters('*')}{UNFINISHED}")
    removable = []
    with suppress(BenchError, OSError):
        _require_ended(run)
        require_ours(run.folder.resolve())
        for path in (path for pattern in patterns for path in run.folder.glob(pattern)):
            if all(_is_own_folder(one) for one in (path, *path.parents) if one.is_relative_to(run.folder)):
                removable.append(_removable(path, "incomplete checkpoint"))
    return removable


def _leftovers(parent: Path) -> Iterator[Removable]:
    """Yield interrupted deletions, jobs without runs and partial files next to run folders."""
    removed = parent / REMOVED
    candidates = [(path, "interrupted deletion") for path in removed.glob("*")] if _is_own_folder(removed) else []
    candidates += [(path, "partial file of the history") for path in parent.glob(_STORE_PARTS)]
    candidates += [
        (path.parent, _OF_NO_RUN)
        for path in parent.glob(f"*/{JOB}")
        if names.is_shared_job(path.parent) and not _runs_of(path.parent) and _is_own_folder(path.parent)
    ]
    for path, what in candidates:
        with suppress(BenchError, OSError):
            if what == _OF_NO_RUN:
                _require_ended(runs.find(path))
            if path.lstat().st_uid == os.geteuid():
                yield _removable(path, what)


def _is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder of this user, and no link."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid in (os.geteuid(), 0)
    return False


def _removable(path: Path, what: str) -> Removable:
    """Return a path with its size; ConfigError if another file system is mounted in it."""
    top = path.lstat()
    size, changed_s = 512 * top.st_blocks, top.st_mtime
    for folder, subfolders, files in os.walk(path):
        for name in (*subfolders, *files):
            try:
                status = Path(folder, name).lstat()
            except FileNotFoundError:  # another process has deleted it
                continue
            if status.st_dev != top.st_dev:
                fix = "unmount this file system first"
                raise ConfigError("another file system is mounted in this folder", where=f"{folder}/{name}", fix=fix)
            size += 512 * status.st_blocks
            changed_s = max(changed_s, status.st_mtime)
    return Removable(path=path, what=what, bytes=size, changed_s=changed_s)


def remove(one: Removable) -> None:
    """Delete a folder or file.

    Raises:
        ConfigError: a process has begun to work on the run.
        BenchError: it cannot be deleted.
    """
    path = one.path
    with written(path):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        elif path.parent.name == REMOVED or not names.is_run(path):
            _delete(path)
        else:
            _delete(_set_aside(path))
    with suppress(OSError):  # other deletions are under way, or there was none
        (path.parent if path.parent.name == REMOVED else path.parent / REMOVED).rmdir()


def _set_aside(path: Path) -> Path:
    """Rename a run folder, so that it no longer looks like a run, and return its new path."""
    with run_lock.driving(path, noun="folder"):  # no process of this machine resumes it meanwhile
        run = runs.find(path)
        if run.jobs and run.is_active:
            raise ConfigError(
                "the run is active", where=str(path), fix=f"cancel the run first: runstop cancel {short(path)}"
            )
        aside = _aside(path)
        path.rename(aside)
    return aside


def _aside(path: Path) -> Path:
    """Return the path to which a run folder is renamed before it is deleted."""
    removed = path.parent / REMOVED
    with suppress(FileExistsError):
        removed.mkdir(mode=NOT_OTHERS)
    if not _is_own_folder(removed):
        what, fix = "this path is not a folder of this user", "delete or rename this path"
        raise ConfigError(what, where=str(removed), fix=fix, rule="CFG-11")
    return removed / f"{path.name}-{token_hex(2)}"


def _delete(path: Path) -> None:
    for name in (PLAN, LEDGER, JOB):  # first what makes it a run
        with suppress(OSError):
            (path / name).unlink()
    shutil.rmtree(path)
