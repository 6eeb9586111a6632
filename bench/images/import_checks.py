"""Checks before an import starts: programs, folders, disk space, credentials."""

import os
import re
import shutil
import stat
from pathlib import Path

from bench.errors import ConfigError
from bench.images import squashfs, tools
from bench.images.reference import HUB, InDaemon, Reference
from bench.rules.finding import Finding, broken

TYPICAL_GIB = 20
"""The unpacked size of nvcr.io/nvidia/pytorch:25.11-py3. Enroot needs it in its temporary folder and for the image."""
MARGIN_BYTES = 64 << 20
HOSTS = {"nvcr.io": ("nvcr.io", "authn.nvidia.com"), HUB: (HUB, "auth.docker.io")}
"""The machines that Enroot's credentials file needs for a registry: the registry and its token server."""


def require(image: Reference | InDaemon | Path, folder: Path) -> None:
    """Raise ConfigError if the import cannot succeed."""
    tools.require("unsquashfs")
    if isinstance(image, Path):
        _check_file(image, folder)
        return
    tools.require("mksquashfs", "enroot")
    if isinstance(image, InDaemon):
        tools.require(image.program)
    for name, path in _enroot_folders().items():
        if not os.access(_existing(path), os.W_OK | os.X_OK):
            raise ConfigError(
                f"this user cannot write into the folder of {name}",
                where=str(path),
                fix=f"set {name} to a folder on a local disk: export {name}=/a/local/disk",
                rule="ENR-03",
            )


def _check_file(path: Path, folder: Path) -> None:
    if not path.is_file():
        raise ConfigError(
            "the file does not exist", where=str(path), fix="give the path of a .sqsh file that exists", rule="ENR-07"
        )
    if not os.access(path, os.R_OK):
        raise ConfigError(
            "this user cannot read the file",
            where=str(path),
            fix="give this user read permission for the file",
            rule="CFG-08",
        )
    if (what := squashfs.quick_damage(path)) is not None:
        raise ConfigError(what, where=str(path), fix="copy or import the file again from its source", rule="ENR-08")
    needed, free = path.stat().st_size + MARGIN_BYTES, shutil.disk_usage(_existing(folder)).free
    if free < needed:
        raise ConfigError(
            f"only {free / 2**30:.2f} GiB are free, but the image needs {needed / 2**30:.2f} GiB",
            where=str(folder),
            fix="free disk space, or choose another --dir",
            rule="ENR-03",
        )


def warnings(image: Reference | InDaemon | Path, folder: Path) -> list[Finding]:
    """Return warnings about an import: missing credentials, little disk space."""
    if isinstance(image, Path):
        return []
    problems = _credential_warnings(image.registry) if isinstance(image, Reference) else []
    for name, path in {**_enroot_folders(), "--dir": folder}.items():
        free_gib = shutil.disk_usage(_existing(path)).free / 2**30
        if free_gib < TYPICAL_GIB:
            what = f"only {free_gib:.1f} GiB are free in {name} ({path}), but a large image needs {TYPICAL_GIB} GiB"
            problems.append(broken("ENR-03", what, str(path), severity="warning"))
    return problems


def _credential_warnings(registry: str) -> list[Finding]:
    """Return problems with Enroot's credentials file for a registry. Only the machine names are read from it."""
    host = registry.partition(":")[0]
    path = _enroot_path("ENROOT_CONFIG_PATH", "XDG_CONFIG_HOME", "~/.config")
    known: set[str] = set()
    problems: list[Finding] = []
    if path is not None and (file := path / ".credentials").is_file() and os.access(file, os.R_OK):
        known = set(re.findall(r"^\s*machine\s+(\S+)", file.read_text(errors="replace"), re.M))
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            what, fix = f"other users can read the credentials in {file}", f"chmod 600 {file}"
            problems.append(broken("ENR-01", what, str(file), fix=fix, severity="warning"))
    if path is not None and (missing := [name for name in HOSTS.get(host, (host,)) if name not in known]):
        what = f"{path}/.credentials has no credentials for {', '.join(missing)}, so only public images can be imported"
        problems.append(broken("ENR-01", what, f"{path}/.credentials", severity="warning"))
    return problems


def _enroot_folders() -> dict[str, Path]:
    """Return Enroot's cache and temporary folders, as far as this machine's configuration shows them."""
    paths = {
        "ENROOT_CACHE_PATH": _enroot_path("ENROOT_CACHE_PATH", "XDG_CACHE_HOME", "~/.cache"),
        "ENROOT_TEMP_PATH": _enroot_path("ENROOT_TEMP_PATH", "TMPDIR", "/tmp"),
    }
    return {name: path for name, path in paths.items() if path is not None}


def _enroot_path(name: str, base: str, default: str) -> Path | None:
    """Return an Enroot folder from its variable, enroot.conf or the default; None if only bash can expand it."""
    value = os.environ.get(name)
    conf = Path(os.environ.get("ENROOT_SYSCONF_PATH", "/etc/enroot")) / "enroot.conf"
    if not value and conf.is_file():
        line = re.search(rf"^\s*{name}[ \t=]+(\S.*)$", conf.read_text(errors="replace"), re.M)
        value = os.path.expandvars(line[1].strip().strip("\"'")) if line else None
    if not value:
        value = os.environ.get(base) or default
        value = value if base == "TMPDIR" else f"{value}/enroot"
    return None if "$" in value or "`" in value else Path(value).expanduser()


def _existing(path: Path) -> Path:
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
