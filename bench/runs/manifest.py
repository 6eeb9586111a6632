"""Write and read the manifest of a run: the checksums of all files of its result, so that a copy can be verified.

It is written last. The job's own output, which is still written when a run ends, is not in it. The files of adapters
and checkpoints are; their checksums are those of the manifests that were written with them, so that no checkpoint is
read again.
"""

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import masked_json
from bench.contract import atomic_files, checksums, mllog, regular_files, run_files
from bench.contract.atomic_files import Content
from bench.contract.run_files import JOB, MANIFEST
from bench.errors import LogError
from bench.mlperf import log as logs
from bench.mlperf import provenance_checks
from bench.runs import command_line
from bench.runs.folder import plan_in

VERSION = 1
PATTERNS = (
    *(run_files.CONFIG, run_files.PLAN, run_files.SCRIPT, run_files.JOB, run_files.LEDGER, run_files.STATUS),
    *(run_files.RESULTS, run_files.prepare_log("*"), f"{run_files.facts('*')}/*", run_files.health("*")),
    *(f"{run_files.ATTEMPTS}/*/{run_files.RESULTS}", run_files.binding("*")),
)
"""The files of a result, in addition to those that logs attach."""
FOLDERS = (run_files.adapters("*"), run_files.checkpoints("*"))
"""Folders of weights, whose files are part of the result."""
UNFINISHED = ".part"
"""The suffix of folders that are not complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a run folder when its run had ended."""

    version: int
    bench: str
    """The version that wrote it."""
    written: str
    """When, in UTC (ISO 8601)."""
    image: dict[str, Any] | None
    """Name and recorded digest of the image when the job was submitted; None for ranks without a container."""
    folders: tuple[str, ...]
    """Folders whose files are not in the manifest: those of weights in manifests of earlier versions, else none."""
    files: Mapping[str, Content]
    """By path relative to the run folder."""


def write(folder: Path) -> None:
    """Write the manifest of a run that has ended.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    known = _written_with_weights(folder)
    manifest = Manifest(
        version=VERSION,
        bench=command_line.installed() or "unknown: not installed",
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        image=_image(folder),
        folders=(),
        files={name: known.get(name) or atomic_files.checksum(folder / name) for name in files(folder)},
    )
    masked_json.write(folder / MANIFEST, _sealed(asdict(manifest)))


def read(folder: Path) -> Manifest | None:
    """Return a run's manifest; None if there is none, or if it has changed since it was written."""
    try:
        return loads(regular_files.read_bytes(folder / MANIFEST))
    except OSError:
        return None


def loads(data: bytes) -> Manifest | None:
    """Return the manifest with this content; None if it has changed since it was written."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        return None
    raw = raw if isinstance(raw, dict) else {}
    body = {name: value for name, value in raw.items() if name != "sha256"}
    try:
        known = {path: Content(**entry) for path, entry in body["files"].items()}
        manifest = Manifest(**(body | {"files": known, "folders": tuple(body["folders"])}))
        is_whole = data == masked_json.text(_sealed(body)).encode()
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    return manifest if is_whole and manifest.version == VERSION else None


def files(folder: Path) -> list[str]:
    """Return the files of the result as paths relative to the run folder, without symbolic links."""
    paths = {path for pattern in PATTERNS for path in folder.glob(pattern)}
    paths |= {path for log in folder.glob(run_files.RESULTS) for path in _attached(log)}
    paths |= {path for part in _weights(folder) for path in part.iterdir()}
    return sorted(path.relative_to(folder).as_posix() for path in paths if _is_file(path))


def _weights(folder: Path) -> Iterator[Path]:
    """Yield the complete folders of weights, with their subfolders, without symbolic links."""
    for top in (path for pattern in FOLDERS for path in folder.glob(pattern)):
        for parent, names, _ in os.walk(top) if not top.is_symlink() else ():
            names[:] = [name for name in names if not name.endswith(UNFINISHED)]
            yield Path(parent)


def _written_with_weights(folder: Path) -> dict[str, Content]:
    """Return the checksums that were written with adapters and checkpoints, by path relative to the run folder."""
    return {
        f"{part.relative_to(folder).as_posix()}/{name}": content
        for part in _weights(folder)
        for name, content in checksums.listed(part).items()
    }


def _attached(log: Path) -> Iterator[Path]:
    if not _is_file(log):
        return
    with suppress(LogError):  # a log that cannot be read is reported when it is judged
        records = logs.read(log)
        paths = (provenance_checks.attached_path(records, record) for record in records.all(mllog.ATTACHED_FILE))
        yield from (path for path in paths if path)


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode) if path.exists() else False


def _image(folder: Path) -> dict[str, Any] | None:
    """Return the image in job.json, else its name in the plan."""
    known = atomic_files.read_object(folder / JOB).get("image")
    if isinstance(known, dict):
        return known
    plan = plan_in(folder)
    return {"name": plan.config.container.image} if plan and plan.config.container.image else None


def _sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own checksum as its last entry."""
    return {**body, "sha256": hashlib.sha256(masked_json.text(body).encode()).hexdigest()}
