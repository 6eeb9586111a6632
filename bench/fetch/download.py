"""Download the files of a repository into a folder: select them, see that they fit, continue, and verify them."""

import fnmatch
import hashlib
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from bench.errors import BenchError, ConfigError, written
from bench.fetch import hub, record
from bench.fetch.hub import RemoteFile, Repository
from bench.fetch.record import Fetched, Record

THREADS = 4
"""Files that are downloaded at the same time."""
WEIGHTS = ".safetensors"
_SUFFIXES = (WEIGHTS, ".json", ".jinja", ".model")
_NAMES = ("merges.txt", "vocab.txt", "LICENSE*", "USE_POLICY*", "NOTICE*")
_NOT_RUN = ("consolidated*", "*.bin.index.json", "*.h5.index.json", "training_args*", "trainer_state.json")
"""Files with names like those above that no run reads: weights in their first layout, indices of pickled weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the user asks for."""

    kind: str
    """model or data."""
    repo: str
    folder: Path
    revision: str | None = None
    """None: that of the folder, if it has a record; otherwise the newest."""
    everything: bool = False
    include: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """What selects files, as on the command line."""
        return ("--all",) if self.everything else tuple(text for glob in self.include for text in ("--include", glob))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A download that has not begun."""

    request: Request
    repo: Repository
    files: tuple[RemoteFile, ...]
    """The selected ones."""
    is_continued: bool
    """The folder has a record, whose revision is downloaded."""
    present_bytes: int
    """Of these files, finished or not, in the folder."""
    free_bytes: int
    """On the folder's disk."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def missing_bytes(self) -> int:
        return self.bytes - self.present_bytes


@dataclass(slots=True)
class Progress:
    """How far a download is; threads add to it."""

    total_bytes: int
    num_files: int
    done_bytes: int = 0
    done_files: int = 0
    received_bytes: int = 0
    """Over the network, since the start of this process."""
    stops: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def received(self, num_bytes: int) -> None:
        """Count bytes from the network; StoppedError if the download must stop."""
        if self.stops:
            raise hub.StoppedError
        with self._lock:
            self.done_bytes += num_bytes
            self.received_bytes += num_bytes

    def skip(self, num_bytes: int) -> None:
        """Count bytes that the folder has."""
        with self._lock:
            self.done_bytes += num_bytes


def plan(request: Request) -> Planned:
    """Ask the hub for the files, and compare them with the folder; nothing is written.

    Raises:
        ConfigError: as `hub.repository`; the folder has another repository or revision; no file is selected.
        BenchError: the hub does not answer.
    """
    known = record.read(request.folder)
    if known is not None and (known.kind, known.repo) != (request.kind, request.repo):
        what = f"the folder has files of the {known.kind} {known.repo}, not of the {request.kind} {request.repo}"
        raise ConfigError(what, where=str(request.folder), fix="give another FOLDER")
    wanted = request.revision or (known.revision if known else None)
    repo = hub.repository(request.kind, request.repo, wanted)
    if known is not None and known.revision != repo.revision:
        what = f"the folder has files of revision {known.revision}, not of the requested revision {repo.revision}"
        fix = "give another FOLDER, or remove --revision to complete this folder"
        raise ConfigError(what, where=str(request.folder), fix=fix)
    files = selected(repo, request)
    return Planned(
        request=request,
        repo=repo,
        files=files,
        is_continued=known is not None,
        present_bytes=sum(_present(request.folder, file) for file in files),
        free_bytes=shutil.disk_usage(_existing(request.folder)).free,
    )


def selected(repo: Repository, request: Request) -> tuple[RemoteFile, ...]:
    """Return the files to download.

    Raises:
        ConfigError: there are none; a path leads out of the folder; a model has no weights in safetensors.
    """
    for file in repo.files:
        if not record.is_inside(file.path):
            what = f"the repository has a file that would be written outside of the folder: {file.path!r}"
            raise ConfigError(what, where=repo.page, fix="do not use this repository: its files are not trustworthy")
    files = [file for file in repo.files if PurePosixPath(file.path).parts[0] not in record.OURS]
    if request.include:
        files = [file for file in files if any(fnmatch.fnmatchcase(file.path, glob) for glob in request.include)]
        if not files:
            what = f"no file of the repository matches --include {' --include '.join(request.include)}"
            some = ", ".join(file.path for file in repo.files[:5])
            fix = f"write a glob that matches the whole path of a file; the first of {len(repo.files)} files: {some}"
            raise ConfigError(what, where=repo.page, fix=fix)
    elif not request.everything:
        files = [file for file in files if _is_needed(file.path, request.kind)]
        if request.kind == "model" and not any(file.path.endswith(WEIGHTS) for file in files):
            what = f"the repository has no {WEIGHTS} in its top folder, and runstop cannot read other weights"
            fix = "choose another repository or revision, or download all files with --all and convert them"
            raise ConfigError(what, where=repo.page, fix=fix)
    if not files:
        raise ConfigError(
            "the repository has no files to download",
            where=repo.page,
            fix="choose another repository or another --revision",
        )
    return tuple(files)


def _is_needed(path: str, kind: str) -> bool:
    """Return whether a run reads a file: of a model, weights in safetensors, its config, tokenizer and licence."""
    if kind == "data":
        return path != ".gitattributes"
    if path.startswith("additional_chat_templates/"):
        return True
    matches = any(fnmatch.fnmatchcase(path, name) for name in _NAMES) or path.endswith(_SUFFIXES)
    return matches and "/" not in path and not any(fnmatch.fnmatchcase(path, name) for name in _NOT_RUN)


def require_room(planned: Planned) -> None:
    """Raise ConfigError if the missing files do not fit on the folder's disk."""
    if planned.missing_bytes > planned.free_bytes:
        what = f"the download needs {gb(planned.missing_bytes)}, but {gb(planned.free_bytes)} are free on the disk"
        fix = "give a FOLDER on a larger disk, free disk space, or select fewer files with --include GLOB"
        raise ConfigError(what, where=str(_existing(planned.request.folder)), fix=fix, rule="CFG-08")


def fetch(planned: Planned, progress: Progress) -> Record:
    """Download and verify the missing files; return the folder's complete record.

    Each file gets its name after its checksum was compared with the hub's. If the process ends before, the next call
    continues, also inside a file.

    Raises:
        ConfigError: the folder is in use, or has another file of the same name.
        BenchError: the hub does not answer; a file has another checksum than the hub states; the disk is full.
    """
    repo, folder = planned.repo, planned.request.folder
    with written(folder), record.locked(folder) as parts:
        known = record.read(folder)
        content = Record(
            kind=repo.kind,
            repo=repo.name,
            endpoint=repo.endpoint,
            revision=repo.revision,
            options=planned.request.options,
            files=known.files if known else {},
        )
        record.write(folder, content)
        content = _all_files(planned, content, parts, progress)
        for part in parts.glob("*.part"):  # of files that are no longer selected
            part.unlink()
        content = replace(content, complete=True)
        record.write(folder, content)
    return content


def _all_files(planned: Planned, content: Record, parts: Path, progress: Progress) -> Record:
    """Return the record with all selected files; after each file, it is written."""
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = {pool.submit(_one_file, planned, file, content, parts, progress): file for file in planned.files}
        try:
            for job in as_completed(jobs):
                content = record.with_file(content, jobs[job].path, job.result())
                progress.done_files += 1
                record.write(planned.request.folder, content)
        except BaseException:
            progress.stops = True
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return content


def _one_file(planned: Planned, file: RemoteFile, content: Record, parts: Path, progress: Progress) -> Fetched:
    place, known = planned.request.folder / file.path, content.files.get(file.path)
    if place.exists():
        progress.skip(file.bytes)
        if known is not None and known.bytes == place.stat().st_size and known.hub_checksum == file.checksum:
            return known
        fetched, is_equal = record.checked(place, file.checksum)
        if not is_equal:
            what = "a file with this name already exists, but its checksum differs from the checksum on the hub"
            raise ConfigError(what, where=str(place), fix="move or delete this file, or give another FOLDER")
        return fetched
    part = _part(parts, file)
    progress.skip(part.stat().st_size if part.exists() else 0)
    hub.download(planned.repo, file, part, received=progress.received)
    fetched, is_equal = record.checked(part, file.checksum)
    if not is_equal:
        part.unlink()
        what = f"the downloaded file does not have the checksum that the hub states: {file.checksum}"
        fix = "run the same command again; if that also fails, a proxy or mirror (HF_ENDPOINT) changes the file"
        raise BenchError(what, where=f"{planned.repo.page}, {file.path}", fix=fix)
    place.parent.mkdir(parents=True, exist_ok=True)
    part.replace(place)
    return fetched


def _part(parts: Path, file: RemoteFile) -> Path:
    """Return the path of an unfinished file; another content has another path."""
    name = hashlib.sha256(f"{file.path} {file.checksum}".encode()).hexdigest()[:32]
    return parts / f"{name}.part"


def _present(folder: Path, file: RemoteFile) -> int:
    """Return how many bytes of a file are in the folder, at most its size."""
    for path in (folder / file.path, _part(folder / record.STATE, file)):
        if path.is_file():
            return min(path.stat().st_size, file.bytes)
    return 0


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def gb(num_bytes: int) -> str:
    """Return a size in GB; in MB below 0.1 GB."""
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.2f} MB"
