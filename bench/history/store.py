"""Cache what all runs below a folder measured in a SQLite file next to the runs: LOGDIR/history.sqlite.

It has the measurements of all valid trials, and the verdicts on all nodes.

The logs are the source. `runstop history` updates the cache; runs do not write to it. So copied runs are in it, no job
waits for a lock on a shared file system, and the file can be deleted. It is replaced atomically, so that several
processes may write it at once. A damaged cache, or one of another version of the code, is rebuilt from the logs.
"""

import hashlib
import json
import logging
import os
import sqlite3
import tempfile
from contextlib import closing, suppress
from dataclasses import astuple, fields, replace
from functools import cache
from pathlib import Path

from bench.contract import regular_files
from bench.contract.run_files import LEDGER, MANIFEST, PLAN, RESULTS
from bench.errors import BenchError
from bench.history import measured_trials
from bench.history import node_verdicts as verdicts_of_nodes
from bench.history.measured_trials import Runs, ValidTrial
from bench.history.node_verdicts import NodeVerdict, VerdictKind
from bench.results.measurement import Measurement
from bench.runs import names

STORE = "history.sqlite"
_RUNS = (f"*/{LEDGER}", f"{names.STUDIES}/*/*/{LEDGER}")
_CODE = ("contract", "diagnosis", "history", "mlperf", "results", "rules")
"""The packages that determine the content of the cache."""
_TABLES = """
CREATE TABLE version (code TEXT NOT NULL);
CREATE TABLE runs (folder TEXT PRIMARY KEY, stamp TEXT NOT NULL, left_out TEXT NOT NULL);
CREATE TABLE trials (
    folder TEXT NOT NULL REFERENCES runs, trial INTEGER NOT NULL, log_sha256 TEXT NOT NULL, began_ms INTEGER NOT NULL,
    task TEXT NOT NULL, facts TEXT NOT NULL, logged TEXT NOT NULL, planned TEXT NOT NULL, PRIMARY KEY (folder, trial)
);
CREATE TABLE measurements (
    folder TEXT NOT NULL, trial INTEGER NOT NULL, name TEXT NOT NULL, unit TEXT NOT NULL, value REAL NOT NULL,
    n INTEGER NOT NULL, p10 REAL, p90 REAL, PRIMARY KEY (folder, trial, name)
);
CREATE TABLE nodes (
    folder TEXT NOT NULL, node TEXT NOT NULL, backend TEXT NOT NULL, kind TEXT NOT NULL, time_ms INTEGER NOT NULL,
    rule TEXT, what TEXT NOT NULL
);
"""
_MODE = 0o644
_log = logging.getLogger(__name__)
Known = dict[str, tuple[str, Runs]]
"""By run folder, relative to the root: the stamp of the files that were read, and the valid trials."""


def trials(root: Path, *, rebuild: bool = False, memory: Known | None = None) -> tuple[ValidTrial, ...]:
    """Return every valid trial below a folder, the oldest first; a trial that was copied counts once.

    With `memory`, what is read is kept there for the next call, and no file is written.

    Raises:
        ConfigError: the folder does not exist.
    """
    every = sorted(
        (trial for runs in _current(root, rebuild, memory).values() for trial in runs.trials),
        key=lambda trial: (trial.began_ms, str(trial.folder), trial.trial),
    )
    return tuple({trial.log_sha256: trial for trial in reversed(every)}.values())[::-1]


def node_verdicts(root: Path, *, rebuild: bool = False) -> dict[Path, tuple[NodeVerdict, ...]]:
    """Return what each run below a folder found out about its nodes; runs that found out nothing are left out.

    Raises:
        ConfigError: the folder does not exist.
    """
    return {root / name: runs.nodes for name, runs in _current(root, rebuild, None).items() if runs.nodes}


def _current(root: Path, rebuild: bool, memory: Known | None) -> dict[str, Runs]:
    """Return the content of the cache by run folder, after reading what has changed."""
    names.require_root(root)
    known = {} if rebuild else memory or _read(root)
    current: Known = {}
    for folder in sorted({path.parent for pattern in _RUNS for path in root.glob(pattern)}):
        name, now = str(folder.relative_to(root)), stamp(folder)
        current[name] = known[name] if name in known and known[name][0] == now else (now, _runs(folder))
    if memory is not None:
        memory.clear()
        memory.update(current)
    elif rebuild or current != known:
        _write(root, current)
    return {name: runs for name, (_, runs) in current.items()}


def _runs(folder: Path) -> Runs:
    try:
        runs = measured_trials.in_folder(folder)
    except BenchError as error:
        runs = Runs(trials=(), left_out=(f"{folder.name}: {error.what}",))
    return replace(runs, nodes=verdicts_of_nodes.of_run(folder))


def stamp(folder: Path) -> str:
    """Return modification times and sizes of the files that a run is read from."""
    files = [folder / LEDGER, folder / PLAN, folder / MANIFEST, *sorted(folder.glob(RESULTS))]
    files += [path for pattern in verdicts_of_nodes.READ for path in sorted(folder.glob(pattern))]
    stamps = []
    for file in files:
        with suppress(OSError):
            state = file.stat()
            stamps.append(f"{file.name} {state.st_mtime_ns} {state.st_size}")
    return "; ".join(stamps)


@cache
def _code() -> str:
    """Return the checksum of the code that determines the content of the cache."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256(_TABLES.encode())
    for file in sorted(path for package in _CODE for path in (root / package).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(root: Path) -> Known:
    """Return the content of the cache; empty if there is none, or if it is damaged or of another version."""
    path = root / STORE
    if not _is_own(path):
        return {}
    try:
        # The file is never changed in place, so no lock is needed; shared file systems may not have locks.
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as store:
            if store.execute("SELECT code FROM version").fetchall() != [(_code(),)]:
                _log.info("another version of runstop wrote the cache %s: it is rebuilt from the logs", path)
                return {}
            return _known(store, root)
    except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
        _log.warning("the cache %s cannot be read and is rebuilt from the logs: %s", path, error)
        return {}


def _is_own(path: Path) -> bool:
    """Return whether only this user can have written the cache; the cache of another one is not believed."""
    try:
        status = path.lstat()
    except OSError:
        return False
    is_ours = status.st_uid in (os.geteuid(), 0) and not status.st_mode & regular_files.OTHERS_WRITE
    return is_ours and regular_files.is_regular(path)


def _known(store: sqlite3.Connection, root: Path) -> Known:
    measured: dict[tuple[str, int], dict[str, Measurement]] = {}
    names = [column.name for column in fields(Measurement)]
    for folder, trial, *values in store.execute(f"SELECT folder, trial, {', '.join(names)} FROM measurements"):
        one = Measurement(**dict(zip(names, values, strict=True)))
        measured.setdefault((folder, trial), {})[one.name] = one
    of_run: dict[str, list[ValidTrial]] = {}
    columns = "folder, trial, log_sha256, began_ms, task, facts, logged, planned"
    for folder, trial, sha256, began_ms, task, *texts in store.execute(f"SELECT {columns} FROM trials ORDER BY trial"):
        facts, logged, planned = map(json.loads, texts)
        of_run.setdefault(folder, []).append(
            ValidTrial(
                folder=root / os.fsdecode(folder),
                trial=trial,
                log_sha256=sha256,
                began_ms=began_ms,
                task=task,
                measurements=measured.get((folder, trial), {}),
                facts=facts,
                logged=logged,
                planned=planned,
            )
        )
    nodes: dict[str, list[NodeVerdict]] = {}
    named = [column.name for column in fields(NodeVerdict)]
    for folder, *values in store.execute(f"SELECT folder, {', '.join(named)} FROM nodes ORDER BY rowid"):
        raw = dict(zip(named, values, strict=True))
        nodes.setdefault(folder, []).append(NodeVerdict(**raw | {"kind": VerdictKind(raw["kind"])}))
    return {
        os.fsdecode(folder): (
            stamp,
            Runs(
                trials=tuple(of_run.get(folder, ())),
                left_out=tuple(json.loads(left_out)),
                nodes=tuple(nodes.get(folder, ())),
            ),
        )
        for folder, stamp, left_out in store.execute("SELECT folder, stamp, left_out FROM runs")
    }


def _write(root: Path, known: Known) -> None:
    """Replace the cache atomically; if this user may not write there, only log a warning."""
    part = None
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix=f".{STORE}.", delete=False) as file:
            part = Path(file.name)
        part.chmod(_MODE)
        with closing(sqlite3.connect(part)) as store, store:
            store.executescript(_TABLES)
            store.execute("INSERT INTO version VALUES (?)", (_code(),))
            for folder, (stamp, runs) in known.items():
                name = _name(folder)
                store.execute("INSERT INTO runs VALUES (?, ?, ?)", (name, stamp, json.dumps(runs.left_out)))
                for trial in runs.trials:
                    _insert(store, name, trial)
                rows = [(name, *astuple(verdict)) for verdict in runs.nodes]
                store.executemany("INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        part.replace(root / STORE)
    except (
        OSError,
        sqlite3.Error,
        ValueError,
        OverflowError,
    ) as error:  # a log may hold values that SQLite cannot store
        _log.warning(
            "the cache %s cannot be written, so the next command reads all logs again: %s", root / STORE, error
        )
    finally:
        if part is not None:
            part.unlink(missing_ok=True)


def _name(folder: str) -> str | bytes:
    """Return the name of a folder as SQLite can store it: as bytes if it is not UTF-8."""
    raw = os.fsencode(folder)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _insert(store: sqlite3.Connection, folder: str | bytes, trial: ValidTrial) -> None:
    texts = (json.dumps(dict(each)) for each in (trial.facts, trial.logged, trial.planned))
    values = (folder, trial.trial, trial.log_sha256, trial.began_ms, trial.task, *texts)
    store.execute("INSERT INTO trials VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)
    rows = [(folder, trial.trial, *astuple(one)) for one in trial.measurements.values()]
    store.executemany("INSERT INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
