"""Read and check squashfs images: the superblock, the file list, and a few files of the image."""

import json
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.images import tools

MARKER = "/etc/runstop-image.json"
"""The file with a description of an image that was built from containers/."""

_SUPERBLOCK = struct.Struct("<4s24xHH8xQ48x")
"""Magic, major and minor version, bytes used. Source: Linux, fs/squashfs/squashfs_fs.h, struct squashfs_super_block."""
_MAGIC = b"hsqs"
_OS_RELEASE = ("usr/lib/os-release", "etc/os-release")
_PROGRAMS = tuple(f"{d}/{p}" for p in ("bash", "dash", "busybox", "env") for d in ("usr/bin", "bin"))
_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 243: "riscv64"}
"""ELF's e_machine, and the architecture as `uname -m` prints it."""
_MAX_BYTES = 1 << 16
FATAL = 1
"""unsquashfs's exit code for a fatal error; 2 means that some file could not be created exactly."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The description of an image; None for what the image does not contain."""

    architecture: str | None
    os_release: dict[str, str] | None
    marker: dict[str, Any] | None


def quick_damage(path: Path) -> str | None:
    """Check superblock and length only; return the error or None."""
    with path.open("rb") as file:
        head = file.read(_SUPERBLOCK.size)
        size = os.fstat(file.fileno()).st_size
    if len(head) < _SUPERBLOCK.size or not head.startswith(_MAGIC):
        return f"the file ({size:,} bytes) has no squashfs superblock: it is incomplete, or not a squashfs image"
    _, major, _, used = _SUPERBLOCK.unpack(head)
    if major != 4:
        return f"the file has squashfs version {major}, but Linux can mount only version 4"
    if used > size:
        return f"the file is truncated: it has {size:,} of {used:,} bytes"
    return None


def damage(path: Path) -> str | None:
    """Check superblock, length and the full file list; return the error or None."""
    if (error := quick_damage(path)) is not None:
        return error
    for option in ("-s", "-l"):
        ended = tools.run(["unsquashfs", option, str(path)])
        if ended.exit_code:
            last = next((line for line in reversed(ended.lines) if line), "no reason given")
            return f"unsquashfs {option} cannot read the file: {last}"
    return None


def contents(path: Path) -> Contents:
    """Return the description of an undamaged image.

    Extracts to a temporary folder, because -cat needs unsquashfs 4.5. Reads regular files only, because a symbolic
    link in an image may point to a file of this machine.

    Raises:
        BenchError: nothing could be extracted.
    """
    names = (MARKER.lstrip("/"), *_OS_RELEASE, *_PROGRAMS)
    with tempfile.TemporaryDirectory(prefix="bench-image-") as folder:
        root = Path(folder).resolve() / "root"
        ended = tools.run(["unsquashfs", "-n", "-no-xattrs", "-d", str(root), str(path), *names])
        if ended.exit_code == FATAL:
            raise _cannot_extract(path, ended)
        read = {name: _regular(root, name) for name in names}
    machines = (_machine(read[name]) for name in _PROGRAMS)
    releases = (read[name] for name in _OS_RELEASE if read[name])
    return Contents(
        architecture=next(filter(None, machines), None),
        os_release=_os_release(next(releases, b"")),
        marker=_marker(read[MARKER.lstrip("/")]),
    )


def _cannot_extract(path: Path, ended: tools.Ended) -> BenchError:
    what = f"unsquashfs cannot extract files: {ended.lines[-1] if ended.lines else 'no reason given'}"
    if any("uncompress" in line for line in ended.lines):
        return BenchError(what, where=str(path), fix="copy or import the file again from its source", rule="ENR-08")
    fix = f"check that {tempfile.gettempdir()} has free space, or set TMPDIR to another folder"
    return BenchError(what, where=str(path), fix=fix)


def _regular(root: Path, name: str) -> bytes:
    path = root / name
    if path.resolve() != path or not path.is_file():
        return b""
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)


def _machine(head: bytes) -> str | None:
    if len(head) < 20 or not head.startswith(b"\x7fELF"):
        return None
    number = int.from_bytes(head[18:20], "big" if head[5] == 2 else "little")
    return _MACHINES.get(number, f"ELF machine {number}")


def _os_release(text: bytes) -> dict[str, str] | None:
    pairs = (line.partition("=") for line in text.decode(errors="replace").splitlines())
    fields = {key: value.strip("\"'") for key, _, value in pairs if key in ("ID", "VERSION_ID", "PRETTY_NAME")}
    return fields or None


def _marker(text: bytes) -> dict[str, Any] | None:
    try:
        marker = json.loads(text)
    except ValueError:
        return None
    return marker if isinstance(marker, dict) else None
