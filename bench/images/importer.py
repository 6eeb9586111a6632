"""Import an image into a folder: checked first, one import at a time, under its final name only when it is whole."""

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
    """An image in the folder."""

    path: Path
    record: Record
    is_new: bool


class Progress(Protocol):
    """Shows a sign of life while a file is written."""

    def __call__(self, part: Path, *, say: Say) -> AbstractContextManager[None]: ...


def _silent(part: Path, *, say: Say) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What to do besides."""

    architecture: str | None = None
    """As `uname -m` says it on the nodes; None: as this machine."""
    again: bool = False
    """Import what is there already: a tag may name another image by now."""
    progress: Progress = _silent
    """Shows how the import of a file proceeds while the block runs."""


def bring(source: str, folder: Path, *, how: How, say: Say) -> Imported:
    """Return the image that SOURCE names, imported into the folder unless it is there; `say` gets progress lines.

    Raises:
        ConfigError: nothing was started.
        BenchError: the import failed, and left nothing.
    """
    wanted = read(source)
    folder = folder.absolute()
    import_checks.require(wanted, folder)
    store.make(folder)
    for warning in import_checks.warnings(wanted, folder):
        say(warning.titled)
    with locked(folder, say=say) as lock:
        present = None if how.again else _already_imported(wanted, folder, how)
        if present is not None:
            return present
        part = folder / f".import-{socket.gethostname()}-{os.getpid()}.part"
        try:
            with how.progress(part, say=say):
                if isinstance(wanted, Path):
                    return _copied(wanted, part, how)
                return _with_enroot(wanted, part, how, say=say, lock=lock)
        except KeyboardInterrupt:
            say("stopped: nothing was imported, nothing is left of it")
            raise
        except OSError as error:
            raise _not_written(error, folder) from error
        finally:
            with suppress(OSError):  # `list` names what cannot be removed
                part.unlink(missing_ok=True)


def _already_imported(wanted: Reference | InDaemon | Path, folder: Path, how: How) -> Imported | None:
    """Return the image if it was imported before, is whole, and made for the nodes."""
    if isinstance(wanted, Path):
        path: Path | None = folder / store.file_name(_label(wanted), atomic_files.sha256(wanted))
    else:
        path = store.newest(folder, wanted.source, architecture=_machine(how))
    if path is None or not path.is_file() or store.faults(path, architecture=_machine(how)):
        return None
    record = store.recorded(path)
    return Imported(path, record, is_new=False) if record else None


def _machine(how: How) -> str:
    return how.architecture or platform.machine()


def _label(path: Path) -> str:
    return path.name.removesuffix(path.suffix)


def _copied(path: Path, part: Path, how: How) -> Imported:
    with path.open("rb") as source, part.open("wb") as copy:
        shutil.copyfileobj(source, copy, BLOCK_BYTES)
    if (what := store.misnamed(path, atomic_files.sha256(part))) is not None:
        fix = "copy it again from where it came; if it is meant to be another image, give it a name without a digest"
        raise BenchError(what, where=str(path), fix=fix, rule="ENR-08")
    return _admitted(part, _label(path), f"file://{path.resolve()}", "copy", how)


def _with_enroot(wanted: Reference | InDaemon, part: Path, how: How, *, say: Say, lock: int) -> Imported:
    importer = f"enroot {tools.version('enroot') or 'of unknown version'}"
    say(f"importing {wanted.source} with {importer}")
    architecture = ["--arch", how.architecture] if how.architecture else []
    argv = ["enroot", "import", *architecture, "--output", str(part), "--", wanted.uri]
    listen = functools.partial(_say_progress, say=say)
    ended = tools.run(argv, listen=listen, keep_open=[lock])  # if we are killed, the next import waits for Enroot's end
    if ended.exit_code or not part.is_file():
        raise _refused(wanted, ended)
    return _admitted(part, wanted.label, wanted.source, importer, how)


def _say_progress(line: str, *, say: Say) -> None:
    """Pass on what Enroot says of itself, and not the statistics of mksquashfs."""
    if line.startswith("["):
        say(line)


def _refused(wanted: Reference | InDaemon, ended: tools.Ended) -> BenchError:
    """Return why Enroot failed: the rule whose sign it shows, and its own words."""
    source = wanted.source
    signs = [(rule, sign) for id, rule in RULES.items() if id.startswith(("ENR", "PYX")) for sign in rule.signs]
    for line in ended.lines:
        for rule, sign in signs:
            if re.search(sign.pattern, line.encode()):
                return BenchError(f"{rule.title}: {line.strip()}", where=source, fix=rule.fix, rule=rule.id)
    last = next((line.strip() for line in reversed(ended.lines) if line.strip()), "it said nothing")
    rule = RULES["ENR-10"]
    what = f"{rule.title}: exit code {ended.exit_code}, {last}"
    return BenchError(what, where=source, fix=_fix(wanted, ended.exit_code), rule=rule.id)


def _fix(wanted: Reference | InDaemon, exit_code: int) -> str:
    """Return what to do about an Enroot that has failed and shows no known sign."""
    if exit_code < 0 or exit_code > 128:
        return "find out what ended Enroot, such as memory or a time limit (`dmesg -T`), and import the image again"
    if isinstance(wanted, InDaemon):
        return f"`{wanted.program} image inspect {wanted.name}` must show the image here: start the daemon, or build it"
    return f"see that {wanted.registry} has this name and tag; `enroot import -- {quote(wanted.uri)}` says more"


def _not_written(error: OSError, folder: Path) -> BenchError:
    """Return an error of the file system in our words."""
    what, where = error.strerror or str(error), str(error.filename or folder)
    if error.errno in NO_ROOM:
        return BenchError(what, where=where, fix="make room, or choose another --dir", rule="ENR-03")
    return BenchError(what, where=where, fix="see that this user may read the image and write to --dir", rule="CFG-08")


def _admitted(part: Path, label: str, source: str, importer: str, how: How) -> Imported:
    """Give a whole image its name, after its record: whoever sees the image can know what it is."""
    if (what := squashfs.damage(part)) is not None:
        raise BenchError(
            what, where=source, fix="import it again; if it fails again, its source is damaged", rule="ENR-08"
        )
    inside = squashfs.contents(part)
    if inside.architecture not in (None, _machine(how)):
        raise BenchError(
            f"it is made for {inside.architecture}, and the nodes are {_machine(how)}",
            where=source,
            fix=f"add --arch {inside.architecture} if the nodes are; else choose an image that is made for them",
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
        architecture=inside.architecture,
        os_release=inside.os_release,
        marker=inside.marker,
    )
    _make_lasting(part)
    with kept(store.record_path(image)):
        store.save(image, record)
        part.replace(image)
    image_digest.remember(image, digest)
    return Imported(image, record, is_new=True)


def _make_lasting(part: Path) -> None:
    """Have it on disk before it gets its name, and let nobody write to it: its name is its content."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.chmod(part.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
