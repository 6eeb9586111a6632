"""A folder of imported images: each file named by its content, beside it a record of what it is and where it came from.

pytorch-25.11-py3-sha256-0123456789ab.sqsh    the image, read-only; it gets this name last, when it is whole
pytorch-25.11-py3-sha256-0123456789ab.json    its record
pytorch-25.11-py3-sha256-0123456789ab.checked when its content was read last, and its digest then
.import-HOST-PID.part                         an import at work, or one that was killed
.import.lock                                  held by the import at work
"""

import dataclasses
import json
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from bench.contract import file_content
from bench.contract.json_files import write
from bench.errors import ConfigError
from bench.images import checksums, squashfs, tools
from bench.rules.finding import Finding, broken

VERSION = 1
"""Of the record."""
SHORT = 12
"""Digits of the digest in a file's name."""
IMPORTED = re.compile(rf"(.+)-sha256-([0-9a-f]{{{SHORT}}})\.sqsh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of an imported image."""

    version: int
    file: str
    source: str
    sha256: str
    size_bytes: int
    imported: str
    """When, in UTC (ISO 8601)."""
    importer: str
    """Enroot and its version, or copy."""
    architecture: str | None
    """Of a program in the image, as `uname -m` says it; None: none was found."""
    os_release: dict[str, str] | None
    marker: dict[str, Any] | None
    """Its /etc/runstop-image.json."""


def file_name(label: str, sha256: str) -> str:
    """Return what the image of this content is called; a digest that the label ends in already is not repeated."""
    label = re.sub(rf"-sha256-[0-9a-f]{{{SHORT}}}$", "", label)
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', label)}-sha256-{sha256[:SHORT]}.sqsh"


def record_path(image: Path) -> Path:
    """Return where an image's record lies."""
    return image.with_suffix(".json")


def recorded(image: Path) -> Record | None:
    """Return the record of an image's file, or None if there is no readable one; the image itself is not read."""
    path = record_path(image.resolve())
    try:
        fields = json.loads(path.read_text())
        return Record(**fields) if fields["version"] == VERSION else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def save(image: Path, record: Record) -> None:
    """Write the record of an image."""
    write(record_path(image), dataclasses.asdict(record))


def faults(image: Path, *, architecture: str | None = None, whole: bool = True) -> list[Finding]:
    """Return all that is wrong with an image's file; architecture is what the nodes are, None: not judged.

    Without `whole` only name, record, superblock and length are looked at, not all of the content.
    """
    image = image.resolve()
    record = recorded(image)
    named = IMPORTED.fullmatch(image.name)
    found = _damage(image, whole=whole)
    if named is None or record is None:
        missing = (
            "its name does not hold its digest" if named is None else "there is no record of it, or none that is one"
        )
        fix = f"python -m bench image import {quote(str(image))}"
        unnamed = broken("ENR-11", missing, str(image), fix=fix, severity="warning")
        return [*found, unnamed, *_wrong_cpu(image, architecture, damaged=bool(found))]
    if record.file != image.name or not record.sha256.startswith(named[2]):
        what, fix = f"its record is of another file, {record.file}", "restore the record, or import it again"
        found.append(broken("ENR-11", what, str(image), fix=fix, severity="warning"))
    if whole and not found:
        found += _changed(image, record, file_content.sha256(image))
    elif image.stat().st_size != record.size_bytes:
        what = f"it has {image.stat().st_size:,} bytes, and had {record.size_bytes:,} when it was imported"
        found.append(_again(image, what))
    return found + _wrong_cpu(image, architecture, damaged=bool(found), known=record.architecture)


def faults_since_change(image: Path) -> list[Finding]:
    """Return what is wrong with an image's file; its content is read only if the file has changed since it last was."""
    image = image.resolve()
    found, record = faults(image, whole=False), recorded(image)
    if record is None or any(finding.rule == "ENR-08" for finding in found):
        return found
    return [*found, *_changed(image, record, checksums.since_change(image))]


def _damage(image: Path, *, whole: bool) -> list[Finding]:
    what = squashfs.damage(image) if whole else squashfs.quick_damage(image)
    return [_again(image, what)] if what else []


def _changed(image: Path, record: Record, digest: str) -> list[Finding]:
    what = f"its content is sha256 {digest}, and was {record.sha256}"
    return [] if digest == record.sha256 else [_again(image, what)]


def misnamed(image: Path, digest: str) -> str | None:
    """Return how a file's content differs from what its name or its record says of it, or None."""
    named, record = IMPORTED.fullmatch(image.name), recorded(image)
    known = record.sha256 if record and record.file == image.name else named[2] if named else digest
    if digest.startswith(known):
        return None
    return f"its content is sha256 {digest}, and was {known} when it got its name"


def _again(image: Path, what: str) -> Finding:
    return broken("ENR-08", what, str(image), fix="delete it and its record, and import it again")


def _wrong_cpu(image: Path, wanted: str | None, *, damaged: bool, known: str | None = None) -> list[Finding]:
    if wanted is None or (damaged and known is None):
        return []
    made_for = known or squashfs.contents(image).architecture
    if made_for in (None, wanted):
        return []
    what = f"it is made for {made_for}, and the nodes are {wanted}"
    return [broken("ENR-07", what, str(image), fix=f"import it with --arch {wanted}")]


def verify(image: Path, *, architecture: str | None) -> tuple[Record | None, list[Finding]]:
    """Return an image's record and all that is wrong with its file.

    `architecture` is that of the nodes; None: that of this machine.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    tools.require("unsquashfs")
    if not image.is_file():
        raise ConfigError(
            "no such file", where=str(image), fix="`python -m bench image list` shows what is there", rule="ENR-07"
        )
    try:
        return recorded(image), faults(image, architecture=architecture or platform.machine())
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", where=str(image), fix="see that this user may"
        ) from error


def newest(folder: Path, source: str, *, architecture: str) -> Path | None:
    """Return the image that was imported last from a source, or None; whether it is whole is another question."""
    images = [path for path in folder.iterdir() if IMPORTED.fullmatch(path.name) and path.is_file()]
    records = [(record, path) for path in images if (record := recorded(path)) and record.source == source]
    fitting = [(record.imported, path) for record, path in records if record.architecture in (None, architecture)]
    return max(fitting)[1] if fitting else None


def make(folder: Path) -> None:
    """Make the folder if it is not there.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.strerror}", where=str(folder), fix="choose another --dir", rule="CFG-08") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError("not writable", where=str(folder), fix="choose another --dir", rule="CFG-08")
