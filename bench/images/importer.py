"""Import an image into a folder. Only one import runs at a time; the image gets its final name when it is complete."""

import errno
import functools
import os
import platform
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Protocol

from bench.contract import atomic_files
from bench.contract.atomic_files import kept
from bench.errors import BenchError
from bench.images import digest as image_digest
from bench.images import import_checks, squashfs, store, tools
from bench.images.reference import InDaemon, Reference, read
from bench.images.store import Record, locked
from bench.rules import RULES

BLOCK_BYTES = 8 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """An imported image; `is_new` is False if it was imported before."""

    path: Path
    record: Record
    is_new: bool


class Progress(Protocol):
    """Shows progress while a file is written."""

    def __call__(self, part: Path, *, say: Say) -> AbstractContextManager[None]: ...


def _silent(part: Path, *, say: Say) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Options of an import."""

    architecture: str | None = None
    """The nodes' architecture as `uname -m` prints it; None: this machine's."""
    reimport: bool = False
    """Import the image even if it is there: a tag may name another image now."""
    progress: Progress = _silent
    """Shows the progress of an import while the block runs."""


def import_image(source: str, folder: Path, *, options: ImportOptions, say: Say) -> Imported:
    """Import the image that SOURCE names into the folder, unless it is there; `say` gets progress lines.

    Raises:
        ConfigError: the import was not started.
        BenchError: the import failed; no file of it is left.
    """
    image = read(source)
    folder = folder.absolute()
    import_checks.require(image, folder)
    store.make(folder)
    for warning in import_checks.warnings(image, folder):
        say(warning.titled)
    with locked(folder, say=say) as lock:
        present = None if options.reimport else _already_imported(image, folder, options)
        if present is not None:
            return present
        part = folder / f".import-{socket.gethostname()}-{os.getpid()}.part"
        try:
            with options.progress(part, say=say):
                if isinstance(image, Path):
                    return _copy(image, part, options)
                return _with_enroot(image, part, options, say=say, lock=lock)
        except KeyboardInterrupt:
            say("interrupted: no image was imported, and the partial file was removed")
            raise
        except OSError as error:
            raise _not_written(error, folder) from error
        finally:
            with suppress(OSError):  # `runstop image list` shows files that cannot be removed
                part.unlink(missing_ok=True)


def _already_imported(image: Reference | InDaemon | Path, folder: Path, options: ImportOptions) -> Imported | None:
    """Return the image if it was imported before, is intact, and has the nodes' architecture."""
    if isinstance(image, Path):
        path: Path | None = folder / store.file_name(_label(image), atomic_files.sha256(image))
    else:
        path = store.newest(folder, image.source, architecture=_machine(options))
    if path is None or not path.is_file() or store.faults(path, architecture=_machine(options)):
        return None
    record = store.recorded(path)
    return Imported(path, record, is_new=False) if record else None


def _machine(options: ImportOptions) -> str:
    return options.architecture or platform.machine()


def _label(path: Path) -> str:
    return path.name.removesuffix(path.suffix)


def _copy(path: Path, part: Path, options: ImportOptions) -> Imported:
    with path.open("rb") as source, part.open("wb") as copy:
        shutil.copyfileobj(source, copy, BLOCK_BYTES)
    if (what := store.misnamed(path, atomic_files.sha256(part))) is not None:
        fix = "copy the image again from its source; if it is a new image, rename the file to a name without a digest"
        raise BenchError(what, where=str(path), fix=fix, rule="ENR-08")
    return _store(part, _label(path), f"file://{path.resolve()}", "copy", options)


def _with_enroot(image: Reference | InDaemon, part: Path, options: ImportOptions, *, say: Say, lock: int) -> Imported:
    importer = f"enroot {tools.version('enroot') or 'of unknown version'}"
    say(f"importing {image.source} with {importer}")
    architecture = ["--arch", options.architecture] if options.architecture else []
    argv = ["enroot", "import", *architecture, "--output", str(part), "--", image.uri]
    listen = functools.partial(_forward_progress, say=say)
    ended = tools.run(argv, listen=listen, keep_open=[lock])  # Enroot keeps the lock even if this process is killed
    if ended.exit_code or not part.is_file():
        raise _enroot_error(image, ended)
    return _store(part, image.label, image.source, importer, options)


def _forward_progress(line: str, *, say: Say) -> None:
    """Forward Enroot's own messages, but not the statistics of mksquashfs."""
    if line.startswith("["):
        say(line)


def _enroot_error(image: Reference | InDaemon, ended: tools.Ended) -> BenchError:
    """Return why Enroot failed: the rule that its output matches, and the matching or last line."""
    source = image.source
    signs = [(rule, sign) for id, rule in RULES.items() if id.startswith(("ENR", "PYX")) for sign in rule.signs]
    for line in ended.lines:
        for rule, sign in signs:
            if re.search(sign.pattern, line.encode()):
                return BenchError(f"{rule.title}: {line.strip()}", where=source, fix=rule.fix, rule=rule.id)
    last = next((line.strip() for line in reversed(ended.lines) if line.strip()), "no output")
    rule = RULES["ENR-10"]
    what = f"{rule.title}: exit code {ended.exit_code}, {last}"
    return BenchError(what, where=source, fix=_fix(image, ended.exit_code), rule=rule.id)


def _fix(image: Reference | InDaemon, exit_code: int) -> str:
    """Return what to do after Enroot failed without a known error message."""
    if exit_code < 0 or exit_code > 128:
        return "find out what killed Enroot (OOM killer, time limit; see `dmesg -T`), then import the image again"
    if isinstance(image, InDaemon):
        return f"start the daemon, or build the image: `{image.program} image inspect {image.name}` must show the image"
    return f"check that {image.registry} has this name and tag; to see details: enroot import -- {quote(image.uri)}"


def _not_written(error: OSError, folder: Path) -> BenchError:
    """Convert an error of the file system."""
    what, where = f"the import failed: {error.strerror or error}", str(error.filename or folder)
    if error.errno in NO_ROOM:
        return BenchError(what, where=where, fix="free disk space, or choose another --dir", rule="ENR-03")
    fix = "check that this user may read the image and write to --dir"
    return BenchError(what, where=where, fix=fix, rule="CFG-08")


def _store(part: Path, label: str, source: str, importer: str, options: ImportOptions) -> Imported:
    """Check a complete image, write its record, and then rename the image to its final name."""
    if (what := squashfs.damage(part)) is not None:
        raise BenchError(
            what,
            where=source,
            fix="import the image again; if the new image also has this error, get another copy of the source",
            rule="ENR-08",
        )
    contents = squashfs.contents(part)
    if contents.architecture not in (None, _machine(options)):
        raise BenchError(
            f"the image is for {contents.architecture} CPUs, but the nodes have {_machine(options)} CPUs",
            where=source,
            fix=f"import another image; or, if the nodes really have {contents.architecture} CPUs, "
            f"add --arch {contents.architecture}",
            rule="ENR-07",
        )
    digest = atomic_files.sha256(part)
    image = part.parent / store.file_name(label, digest)
    record = Record(
        version=store.VERSION,
        file=image.name,
        source=source,
        sha256=digest,
        size_bytes=part.stat().st_size,
        imported=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        importer=importer,
        architecture=contents.architecture,
        os_release=contents.os_release,
        marker=contents.marker,
    )
    _sync_and_protect(part)
    with kept(store.record_path(image)):
        store.save(image, record)
        part.replace(image)
    image_digest.remember(image, digest)
    return Imported(image, record, is_new=True)


def _sync_and_protect(part: Path) -> None:
    """Flush the file to disk and make it read-only, before it gets the name that contains its digest."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.chmod(part.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
