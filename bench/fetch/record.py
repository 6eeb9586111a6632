"""The record of a downloaded folder, runstop_fetch.json: where its files are from, their sizes and checksums."""

import fcntl
import hashlib
import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from bench.contract import atomic_files, regular_files
from bench.contract.checksums import FETCH_RECORD
from bench.errors import ConfigError
from bench.fetch.hub import CONTINUES, KINDS

VERSION = 1
STATE = ".runstop_fetch"
"""The folder of the lock and of unfinished files, inside the downloaded folder."""
OURS = (FETCH_RECORD, STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A file of the folder."""

    bytes: int
    sha256: str
    hub_checksum: str
    """What the hub states: sha256:… or git-sha1:…; compared with the content after the download."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of a folder's record."""

    kind: str
    repo: str
    endpoint: str
    revision: str
    options: tuple[str, ...] = ()
    """What selects the files, as on the command line: --all, --include GLOB."""
    complete: bool = False
    files: Mapping[str, Fetched] = field(default_factory=dict)

    def command(self, folder: Path) -> str:
        """Return the command that downloads this again, or the rest of it."""
        words = [self.kind, self.repo, str(folder), "--revision", self.revision, *self.options]
        return shlex.join(["runstop", "fetch", *words])


def read(folder: Path) -> Record | None:
    """Return the record of a folder; None without one.

    Raises:
        ConfigError: it is damaged.
    """
    path = folder / FETCH_RECORD
    if not path.exists():
        return None
    content = atomic_files.read_object(path)
    try:
        return _record(content)
    except (KeyError, TypeError, ValueError) as error:
        what = f"the record of the download is damaged: {error}"
        fix = "delete this file; then `runstop fetch` compares the files of the folder with the hub's checksums"
        raise ConfigError(what, where=str(path), fix=fix) from error


def _record(content: dict[str, Any]) -> Record:
    if content.get("version") != VERSION:
        raise ValueError(f"the file has version {content.get('version')!r}, but runstop reads only version {VERSION}")
    if content["kind"] not in KINDS or not all(
        isinstance(content[key], str) for key in ("repo", "endpoint", "revision")
    ):
        raise ValueError("kind, repo, endpoint or revision is missing")
    files = {}
    for entry in content["files"]:
        if not is_inside(entry["path"]):
            raise ValueError(f"the path {entry['path']!r} leads out of the folder")
        files[entry["path"]] = Fetched(
            bytes=int(entry["bytes"]), sha256=str(entry["sha256"]), hub_checksum=str(entry["hub_checksum"])
        )
    return Record(
        kind=content["kind"],
        repo=content["repo"],
        endpoint=content["endpoint"],
        revision=content["revision"],
        options=tuple(map(str, content["options"])),
        complete=content["complete"] is True,
        files=files,
    )


def write(folder: Path, record: Record) -> None:
    """Replace the record of a folder."""
    files = [
        {"path": path, "bytes": file.bytes, "sha256": file.sha256, "hub_checksum": file.hub_checksum}
        for path, file in sorted(record.files.items())
    ]
    content = {name: getattr(record, name) for name in ("kind", "repo", "endpoint", "revision", "options", "complete")}
    atomic_files.write(folder / FETCH_RECORD, {"version": VERSION, **content, "files": files})


def with_file(record: Record, path: str, file: Fetched) -> Record:
    return replace(record, files={**record.files, path: file})


def is_inside(path: Any) -> bool:
    """Return whether a path of a repository is a path inside its folder."""
    if not isinstance(path, str) or "\\" in path or "\0" in path or path.startswith("/"):
        return False
    parts = PurePosixPath(path).parts
    return bool(parts) and ".." not in parts


def checked(path: Path, hub_checksum: str) -> tuple[Fetched, bool]:
    """Return the size and SHA-256 of a file, and whether its content has the hub's checksum."""
    size = path.stat().st_size
    digests = {"sha256": hashlib.sha256(), "git-sha1": hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)}
    kind, _, wanted = hub_checksum.partition(":")
    with regular_files.opened(path, follows_links=True) as file:
        while chunk := file.read(1 << 22):
            for name in {"sha256", kind}:
                digests[name].update(chunk)
    fetched = Fetched(bytes=size, sha256=digests["sha256"].hexdigest(), hub_checksum=hub_checksum)
    return fetched, digests[kind].hexdigest() == wanted


def problems(folder: Path, record: Record) -> Iterator[tuple[str, str]]:
    """Yield (path, what is wrong) for each file that differs from the record; reads all files."""
    for path, known in sorted(record.files.items()):
        place = folder / path
        try:
            if not place.exists():
                yield path, "is missing"
            elif (size := place.stat().st_size) != known.bytes:
                yield path, f"has {size:,} bytes, but had {known.bytes:,} when it was downloaded"
            elif atomic_files.sha256(place) != known.sha256:
                yield path, "was changed: its SHA-256 differs from the recorded SHA-256"
        except OSError as error:
            yield path, f"cannot be read: {error.strerror or error}"


@contextmanager
def locked(folder: Path) -> Iterator[Path]:
    """Create the folder and hold its lock; yield the folder of unfinished files.

    Raises:
        ConfigError: another process downloads into the folder, or the file system has no locks.
        OSError: the folder cannot be written.
    """
    state = folder / STATE
    with atomic_files.existing(state):
        path = state / "lock"
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644), "r+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                what = (
                    f"another runstop fetch downloads into this folder: {lock.read(200).strip() or 'unknown process'}"
                )
                fix = f"wait until the other download has ended; then {CONTINUES}"
                raise ConfigError(what, where=str(folder), fix=fix) from error
            except OSError as error:
                what = f"the folder cannot be locked: {error.strerror}"
                fix = "choose a FOLDER on a file system that supports locks (mount Lustre with the option flock)"
                raise ConfigError(what, where=str(path), fix=fix) from error
            lock.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
            yield state
