"""What an import warns about or refuses before it starts: disk space, credentials, folders, and damaged files."""

import os
import shutil
import struct
from collections import namedtuple
from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.images import import_checks, reference, squashfs

GIB = 1 << 30
Usage = namedtuple("Usage", ("total", "used", "free"))
VARIABLES = ("ENROOT_CACHE_PATH", "ENROOT_TEMP_PATH", "ENROOT_CONFIG_PATH", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")


@pytest.fixture
def free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return GiB that are free by folder, which a test can change; Enroot's folders are in the folder of the test."""
    for name in (*VARIABLES, "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ENROOT_SYSCONF_PATH", str(tmp_path / "etc"))
    known: dict[str, float] = {}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, round(known.get(Path(path).name, 100.0) * GIB)))
    return known


def warned(source: str, folder: Path) -> list[tuple[str, str, str, str]]:
    problems = import_checks.warnings(reference.read(source), folder)
    assert {one.severity for one in problems} <= {"warning"}
    return [
        (one.rule, one.what.replace(str(folder), "HERE"), one.where.replace(str(folder), "HERE"), one.fix)
        for one in problems
    ]


def test_each_folder_with_less_than_twenty_gib_is_named(
    tmp_path: Path, free: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cache", "temp", "images"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("ENROOT_CACHE_PATH", f"{tmp_path}/cache")
    monkeypatch.setenv("ENROOT_TEMP_PATH", f"{tmp_path}/temp/not/yet")
    free.update(cache=19.99, temp=3.21, images=20.0)

    def spaces() -> list[str]:
        return [one.what.replace(str(tmp_path), "") for one in import_checks.warnings(daemon, tmp_path / "images")]

    daemon = reference.read("dockerd://a")
    assert spaces() == [
        "only 20.0 GiB are free in ENROOT_CACHE_PATH (/cache), but a large image needs 20 GiB",
        "only 3.2 GiB are free in ENROOT_TEMP_PATH (/temp/not/yet), but a large image needs 20 GiB",
    ]
    free.update(cache=20.0, temp=20.0, images=19.0)
    assert spaces() == ["only 19.0 GiB are free in --dir (/images), but a large image needs 20 GiB"]
    assert import_checks.warnings(tmp_path / "a.sqsh", tmp_path) == []
    free.update(images=20.0, tmp=1.0, enroot=1.0)
    monkeypatch.delenv("ENROOT_CACHE_PATH")
    monkeypatch.delenv("ENROOT_TEMP_PATH")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/enroot.conf").write_text(
        '#ENROOT_CACHE_PATH /no\nENROOT_CACHE_PATH "$HOME/temp"\n ENROOT_TEMP_PATH = ${UNSET_NAME}/x\n'
    )
    free.update(temp=2.0)
    assert spaces() == ["only 2.0 GiB are free in ENROOT_CACHE_PATH (/temp), but a large image needs 20 GiB"]


def test_missing_and_readable_credentials_are_named(
    tmp_path: Path, free: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def what(source: str) -> list[str]:
        return [f"{rule}: {what}" for rule, what, _, _ in warned(source, tmp_path)]

    file, none = "HERE/.config/enroot/.credentials", "so only public images can be imported"
    assert what("nvcr.io/a/b") == [f"ENR-01: {file} has no credentials for nvcr.io, authn.nvidia.com, {none}"]
    assert what("ubuntu") == [f"ENR-01: {file} has no credentials for registry-1.docker.io, auth.docker.io, {none}"]
    assert what("localhost:5000/a") == [f"ENR-01: {file} has no credentials for localhost, {none}"]
    assert what("dockerd://a") == []
    path = tmp_path / ".config/enroot/.credentials"
    path.parent.mkdir(parents=True)
    path.write_text("machine nvcr.io login a\n  machine\tauthn.nvidia.com login b\n#machine localhost\n")
    for mode, is_open in ((0o600, False), (0o640, True), (0o604, True)):
        path.chmod(mode)
        expected = [("ENR-01", f"other users can read the credentials in {file}", file, f"chmod 600 {path}")]
        assert warned("nvcr.io/a/b", tmp_path) == (expected if is_open else []), oct(mode)
    path.chmod(0o600)
    assert what("localhost/a") == [f"ENR-01: {file} has no credentials for localhost, {none}"]
    monkeypatch.setenv("XDG_CONFIG_HOME", f"{tmp_path}/own")
    assert what("localhost/a") == [f"ENR-01: HERE/own/enroot/.credentials has no credentials for localhost, {none}"]
    monkeypatch.setenv("ENROOT_CONFIG_PATH", f"{tmp_path}/`id`")
    assert what("localhost/a") == []


def squashed(path: Path, *, magic: bytes = b"hsqs", major: int = 4, used: int = 200, size: int = 200) -> Path:
    """Write a superblock as Linux's fs/squashfs/squashfs_fs.h has it: the version at byte 28, the length at byte 40."""
    head = bytearray(max(96, size))
    head[:4] = magic
    head[28:32] = struct.pack("<HH", major, 0)
    head[40:48] = struct.pack("<Q", used)
    path.write_bytes(bytes(head[:size]))
    return path


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, None),
        ({"size": 201}, None),
        ({"size": 96, "used": 96}, None),
        ({"size": 199}, "the file is truncated: it has 199 of 200 bytes"),
        ({"used": 1 << 40}, "the file is truncated: it has 200 of 1,099,511,627,776 bytes"),
        ({"major": 3}, "the file has squashfs version 3, but Linux can mount only version 4"),
        (
            {"size": 95},
            "the file (95 bytes) has no squashfs superblock: it is incomplete, or not a squashfs image",
        ),
        (
            {"magic": b"sqsh"},
            "the file (200 bytes) has no squashfs superblock: it is incomplete, or not a squashfs image",
        ),
    ],
)
def test_the_superblock_of_a_file_is_checked(changes: dict[str, int], what: str | None, tmp_path: Path) -> None:
    assert squashfs.quick_damage(squashed(tmp_path / "a.sqsh", **changes)) == what  # type: ignore[arg-type]


def refused(image: reference.Reference | reference.InDaemon | Path, folder: Path) -> tuple[str, str, str]:
    with pytest.raises(ConfigError) as error:
        import_checks.require(image, folder)
    return error.value.what, error.value.where, error.value.fix


def test_an_import_that_cannot_succeed_is_refused(
    tmp_path: Path, free: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("unsquashfs", "mksquashfs", "enroot"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    image, target = squashed(tmp_path / "a.sqsh", used=4096, size=4096), tmp_path / "images"
    import_checks.require(image, target)
    missing = tmp_path / "b.sqsh"
    assert refused(missing, target) == (
        "the file does not exist",
        str(missing),
        "give the path of a .sqsh file that exists",
    )
    missing.mkdir()
    assert refused(missing, target)[0] == "the file does not exist"
    short = squashed(tmp_path / "c.sqsh", size=100)
    assert refused(short, target) == (
        *(
            "the file is truncated: it has 100 of 200 bytes",
            str(short),
            "copy or import the file again from its source",
        ),
    )
    needed = 4096 + 64 * 2**20
    free[tmp_path.name] = needed / GIB
    import_checks.require(image, target)
    free[tmp_path.name] = (needed - 4) / GIB
    assert refused(image, target) == (
        *(
            "only 0.06 GiB are free, but the image needs 0.06 GiB",
            str(target),
            "free disk space, or choose another --dir",
        ),
    )
    monkeypatch.setattr(os, "access", lambda path, mode: mode not in (os.R_OK, os.W_OK | os.X_OK))
    assert refused(image, target) == (
        *("this user cannot read the file", str(image), "give this user read permission for the file"),
    )
    monkeypatch.setenv("ENROOT_CACHE_PATH", "/cache")
    monkeypatch.setattr(shutil, "which", lambda name, **more: name)
    assert refused(reference.read("ubuntu"), target) == (
        "this user cannot write into the folder of ENROOT_CACHE_PATH",
        "/cache",
        "set ENROOT_CACHE_PATH to a folder on a local disk: export ENROOT_CACHE_PATH=/a/local/disk",
    )
