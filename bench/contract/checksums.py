"""The checksums of rows and weights: written with their folder, compared when they are read.

A folder's manifest.json lists its files: {"files": [{path, bytes, sha256}, …]}. Standard library only: ranks import it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.contract import atomic_files
from bench.contract.atomic_files import Content
from bench.errors import ConfigError

MANIFEST = "manifest.json"
FETCH_RECORD = "runstop_fetch.json"
"""What `runstop fetch` writes into a folder that it downloads; its list of files is that of a manifest."""
WEIGHTS = (".safetensors", ".distcp", ".pt", ".json", ".model", ".jinja")
"""The suffixes of the files in a folder of weights that a run reads; `WEIGHT_FILES` are further names."""
WEIGHT_FILES = (".metadata", "merges.txt", "vocab.txt")
CHANGED = "CFG-12"
"""The rule of everything that changed although a run relies on it."""


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder of weights that a run may read, without those of its subfolders."""
    files = [path.name for path in folder.iterdir() if path.is_file()]
    return sorted(x for x in files if x not in (MANIFEST, FETCH_RECORD) and (x.endswith(WEIGHTS) or x in WEIGHT_FILES))


def of_files(folder: Path, names: Iterable[str], *, threads: int = 1) -> dict[str, Content]:
    """Return the contents of some files of a folder, by name."""
    names = list(names)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(lambda name: atomic_files.checksum(folder / name), names), strict=True))


def described(folder: Path, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return name, size and sha256 of some files of a folder, as a manifest lists them."""
    return [{"path": name, "bytes": x.bytes, "sha256": x.sha256} for name, x in of_files(folder, names).items()]


def write(folder: Path, names: Iterable[str]) -> None:
    """Write the manifest of a folder, which does not have its final name yet."""
    (folder / MANIFEST).write_text(json.dumps({"files": described(folder, names)}, indent=1) + "\n")


def listed(folder: Path) -> dict[str, Content]:
    """Return the contents in a folder's manifest or, without one, in the record of its download, by name.

    Empty without both. Files without a sha256 are left out.
    """
    contents = {}
    manifest = folder / MANIFEST
    entries = atomic_files.read_object(manifest if manifest.exists() else folder / FETCH_RECORD).get("files")
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"path": str(path), "bytes": int(size), "sha256": str(digest)}:
                contents[path] = Content(bytes=size, sha256=digest)
    return contents


def identity(contents: Mapping[str, Content]) -> str:
    """Return one SHA-256 for the names and contents of all files, in any order."""
    lines = (f"{content.sha256} {content.bytes} {name}\n" for name, content in sorted(contents.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def changed(what: str, where: Path | str, *, fix: str) -> ConfigError:
    """Return the error for an input that changed."""
    return ConfigError(what, where=str(where), fix=fix, rule=CHANGED)


def differing(actual: Mapping[str, Content], wanted: Mapping[str, Content]) -> str:
    """Return how the first file differs from the manifest, or an empty text; files that it does not list may differ."""
    for name, content in sorted(actual.items()):
        if name in wanted and content != wanted[name]:
            known = wanted[name]
            if content.bytes != known.bytes:
                return f"{name} has {content.bytes:,} bytes, but had {known.bytes:,} when it was written"
            return f"{name} was changed: its SHA-256 differs from the recorded SHA-256"
    return ""
