"""Build the test image from this machine's Python and this project.

It has two layers. The lower one has Python, the packages that runstop and its engine need, and the system libraries
that they link; it is cached until a version changes. The upper one has the current project. The image has no shell, no
user and no package manager.
"""

import hashlib
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
CACHE = Path("~/.cache/runstop/kubernetes-image").expanduser()
NAME, PAUSE = "localhost/runstop:test", "localhost/pause:test"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"opt/python/lib/{PYTHON}/site-packages"
ENVIRONMENT = ["PATH=/opt/python/bin", "LD_LIBRARY_PATH=/opt/python/lib", "PYTHONDONTWRITEBYTECODE=1"]
Files = Iterator[tuple[Path, str]]
"""A file here, and its path in the image."""


def distributions() -> dict[str, importlib.metadata.Distribution]:
    """Return the packages that runstop and its engine need, with their dependencies, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed: dict[str, importlib.metadata.Distribution] = {}
    required = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["engine"])]
    while required:
        one = required.pop()
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name in installed or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        try:
            installed[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        needs = map(Requirement, installed[name].requires or [])
        required += [
            r for r in needs if not r.marker or any(r.marker.evaluate({"extra": e}) for e in ("", *one.extras))
        ]
    return dict(sorted(installed.items()))


def python_files() -> Files:
    base = Path(sys.base_prefix)
    yield Path(sys.executable).resolve(), f"opt/python/bin/{PYTHON}"
    yield from ((path, f"opt/python/lib/{path.name}") for path in base.glob(f"lib/lib{PYTHON}*.so*"))
    library = Path(importlib.metadata.__file__).parents[2]
    for path in sorted(library.rglob("*")):
        parts = path.relative_to(library).parts
        if path.is_file() and not {"site-packages", "dist-packages", "test", "__pycache__", "idlelib"} & set(parts):
            yield path, f"opt/python/lib/{PYTHON}/{'/'.join(parts)}"


def package_files() -> Files:
    for one in distributions().values():
        for file in one.files or []:
            path = Path(str(file.locate()))
            if path.is_file() and ".." not in file.parts and "__pycache__" not in file.parts:
                yield path, f"{PACKAGES}/{file}"


def system_libraries(files: Iterable[Path]) -> Files:
    """Yield the system libraries that files link."""
    libraries: set[str] = set()
    for path in files:
        if ".so" in path.name or path.name == PYTHON:
            output = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
            libraries |= set(re.findall(r"(?:^|\s)(/(?:usr/)?lib\S*) \(0x", output))
    yield from ((Path(path).resolve(), path.removeprefix("/")) for path in sorted(libraries))


def project_files() -> Files:
    for top, to in (("bench", "bench"), ("jobs", "jobs"), ("conf", "bench/conf")):
        for path in sorted((ROOT / top).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path, f"{PACKAGES}/{to}/{path.relative_to(ROOT / top)}"


def layer(path: Path, files: Files, *, links: dict[str, str], folders: Iterable[str] = ()) -> None:
    """Write a layer: the same files give the same bytes."""
    with tarfile.open(path, "w") as tar:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        for source, name in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = source.stat().st_size, 0o755 if source.stat().st_mode & 0o111 else 0o644
            with source.open("rb") as content:
                tar.addfile(entry, content)
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)


def base_layer() -> Path:
    """Return the lower layer from the cache, or create it."""
    versions = [sys.version, *(f"{name} {one.version}" for name, one in distributions().items())]
    key = hashlib.sha256("\n".join(versions).encode()).hexdigest()[:16]
    path = CACHE / f"base-{key}.tar"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        for old in CACHE.glob("base-*.tar"):
            old.unlink()
        files = [*python_files(), *package_files()]
        known = {name for _, name in files}
        files += [pair for pair in system_libraries(p for p, _ in files) if pair[1] not in known]
        links = {"opt/python/bin/python": PYTHON, "opt/python/bin/python3": PYTHON}
        links |= {} if any(name.startswith("lib64/") for _, name in files) else {"lib64": "lib"}
        part = path.with_suffix(".part")
        layer(part, iter(files), links=links, folders=("tmp", "etc"))
        part.rename(path)
    return path


def add(tar: tarfile.TarFile, content: bytes | Path, name: str | None = None) -> dict[str, object]:
    """Put a blob into an archive, under its digest or a name; return its descriptor."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            entry = tarfile.TarInfo(name or f"blobs/sha256/{digest}")
            entry.size = content.stat().st_size
            tar.addfile(entry, file)
    else:
        digest = hashlib.sha256(content).hexdigest()
        entry = tarfile.TarInfo(name or f"blobs/sha256/{digest}")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return {"digest": f"sha256:{digest}", "size": entry.size}


def image(tar: tarfile.TarFile, name: str, layers: list[Path], **config: object) -> dict[str, object]:
    """Put an image into an archive; return its entry for the index. Source: the OCI image specification, 1.0."""
    blobs = [add(tar, path) for path in layers]
    fs = {"type": "layers", "diff_ids": [blob["digest"] for blob in blobs]}
    described = {"architecture": "amd64", "os": "linux", "config": config, "rootfs": fs}
    settings = add(tar, json.dumps(described).encode())
    manifest = {
        "schemaVersion": 2,
        "config": settings | {"mediaType": "application/vnd.oci.image.config.v1+json"},
        "layers": [blob | {"mediaType": "application/vnd.oci.image.layer.v1.tar"} for blob in blobs],
    }
    entry = add(tar, json.dumps(manifest).encode())
    kind = {"mediaType": "application/vnd.oci.image.manifest.v1+json"}
    return entry | kind | {"annotations": {"io.containerd.image.name": name}}


def write(archive: Path, pause: Path) -> None:
    """Write an archive with the image of the tests and that of the pause container."""
    project, small = archive.with_suffix(".project"), archive.with_suffix(".pause")
    layer(project, project_files(), links={})
    layer(small, iter([(pause, "pause")]), links={})
    with tarfile.open(archive, "w") as tar:
        entries = [
            image(tar, NAME, [base_layer(), project], Env=ENVIRONMENT),
            image(tar, PAUSE, [small], Entrypoint=["/pause"]),
        ]
        add(tar, json.dumps({"imageLayoutVersion": "1.0.0"}).encode(), "oci-layout")
        add(tar, json.dumps({"schemaVersion": 2, "manifests": entries}).encode(), "index.json")
    project.unlink()
    small.unlink()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
