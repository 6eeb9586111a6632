"""Images for Pyxis and Enroot: the meaning of names, what may enter the folder, and which damaged files are found."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from bench import cli
from bench.backends.slurm import checks
from bench.contract import atomic_files
from bench.errors import BenchError, ConfigError
from bench.images import importer, reference, squashfs, store
from bench.rules.check import Finding, Subject
from helpers import answers
from helpers.failing_disk import contents, failing

pytestmark = pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="squashfs-tools are not installed")

HERE = platform.machine()
DIGEST = f"sha256:{'a1' * 32}"
QUICK = ("-Xcompression-level", "1")
"""Options of mksquashfs that need a seventh of the CPU time, for a slightly larger image."""


# names


@pytest.mark.parametrize(
    ("source", "uri", "label"),
    [
        ("nvcr.io/nvidia/pytorch:25.11-py3", "docker://nvcr.io#nvidia/pytorch:25.11-py3", "pytorch-25.11-py3"),
        ("docker://$oauthtoken@nvcr.io#nvidia/nemo:1", "docker://$oauthtoken@nvcr.io#nvidia/nemo:1", "nemo-1"),
        (f"nvcr.io/nvidia/pytorch:1@{DIGEST}", f"docker://nvcr.io#nvidia/pytorch:{DIGEST}", "pytorch-1"),
        (f"localhost:5000/a/b@{DIGEST}", f"docker://localhost:5000#a/b:{DIGEST}", "b"),
        ("ubuntu", "docker://registry-1.docker.io#library/ubuntu:latest", "ubuntu-latest"),
        ("docker://docker.io/nvidia/cuda:13", "docker://registry-1.docker.io#nvidia/cuda:13", "cuda-13"),
        ("dockerd://acme/runstop-train:1", "dockerd://acme/runstop-train:1", "runstop-train-1"),
    ],
)
def test_a_uri_works_with_every_version_of_enroot(source: str, uri: str, label: str) -> None:
    image = reference.read(source)
    assert not isinstance(image, Path)
    assert (image.uri, image.label) == (uri, label)


@pytest.mark.parametrize(
    "source", ["", "Nvidia/PyTorch:1", "ftp://a/b", "a b", "nvcr.io/nvidia/x@sha256:12", "dockerd://"]
)
def test_an_invalid_image_name_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid image name"):
        reference.read(source)


def test_a_password_in_a_name_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError, match="CFG-07") as refused:
        reference.read("docker://me:hunter2@nvcr.io#nvidia/pytorch:1")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("image", "corrected"),
    [
        ("tiny.sqsh", "./tiny.sqsh"),
        ("images/tiny.squashfs", "./images/tiny.squashfs"),
        ("~/tiny.sqsh", f"{Path.home()}/tiny.sqsh"),
        ("file:///raid/tiny.sqsh", "/raid/tiny.sqsh"),
        ("nvcr.io/nvidia/pytorch:25.11-py3", "nvcr.io#nvidia/pytorch:25.11-py3"),
        ("docker://$oauthtoken@nvcr.io/nvidia/pytorch:1", "docker://$oauthtoken@nvcr.io#nvidia/pytorch:1"),
        (f"https://nvcr.io/nvidia/pytorch@{DIGEST}", f"nvcr.io#nvidia/pytorch@{DIGEST}"),
        ("localhost:5000/runstop-train", "localhost:5000#runstop-train"),
        ("docker.io/library/ubuntu:24.04", "registry-1.docker.io#library/ubuntu:24.04"),
    ],
)
def test_a_name_that_pyxis_would_misread_is_corrected(image: str, corrected: str) -> None:
    spelling = reference.misspelled(image)
    assert spelling is not None and spelling.corrected == corrected
    assert reference.misspelled(corrected) is None


@pytest.mark.parametrize(
    "image", ["/raid/a.sqsh", "./a.sqsh", "../a.sqsh", "nvidia/cuda:13", "ubuntu", "nvcr.io#nvidia/x:1"]
)
def test_a_name_that_pyxis_reads_correctly_is_unchanged(image: str) -> None:
    assert reference.misspelled(image) is None


# files


@pytest.fixture
def squashed(tmp_path: Path) -> Callable[..., Path]:
    """Create a real image from a program of this machine and files."""

    def make(name: str = "tiny.sqsh", **files: str) -> Path:
        root = tmp_path / f"root-{name}"
        for place, content in {"usr/lib/os-release": 'ID=tiny\nPRETTY_NAME="Tiny 1"\n', **files}.items():
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_text(content)
        (root / "usr/bin").mkdir()
        shutil.copy("/bin/bash", root / "usr/bin/bash")
        (root / "bin").symlink_to("usr/bin")
        (root / "etc").mkdir(exist_ok=True)
        (root / "etc/os-release").symlink_to("../usr/lib/os-release")
        subprocess.run(["mksquashfs", root, tmp_path / name, "-quiet", "-no-progress", "-noappend", *QUICK], check=True)
        return tmp_path / name

    return make


def bring(source: object, folder: Path, **how: Any) -> tuple[importer.Imported, list[str]]:
    lines: list[str] = []
    return importer.import_image(str(source), folder, options=importer.ImportOptions(**how), say=lines.append), lines


@pytest.fixture
def image(squashed: Callable[..., Path], tmp_path: Path) -> Path:
    return bring(squashed(), tmp_path / "images")[0].path


@pytest.mark.long
def test_an_imported_file_has_its_digest_in_name_and_record(squashed: Callable[..., Path], tmp_path: Path) -> None:
    marker = {"name": "runstop-train", "versions": {"torch": "2.10"}, "commit": "c0ffee"}
    file = squashed(**{"etc/runstop-image.json": json.dumps(marker)})
    imported, _ = bring(file, tmp_path / "new" / "images")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert imported.is_new and imported.path.name == f"tiny-sha256-{digest[:12]}.sqsh"
    assert imported.path.read_bytes() == file.read_bytes()
    assert imported.path.stat().st_mode & 0o222 == 0
    record = store.recorded(imported.path)
    assert record == imported.record
    assert record.sha256 == digest and record.source == f"file://{file}" and record.marker == marker
    assert record.architecture == HERE and record.os_release == {"ID": "tiny", "PRETTY_NAME": "Tiny 1"}
    assert store.verify(imported.path, architecture=None) == (record, [])
    second, _ = bring(file, imported.path.parent)
    assert not second.is_new and second.record == record
    assert sorted(p.suffix for p in imported.path.parent.iterdir()) == [".checked", ".json", ".lock", ".sqsh"]


def damaged(image: Path, how: str) -> Path:
    """Damage an imported image."""
    content = image.read_bytes()
    image.chmod(0o644)
    if how == "cut":
        image.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        image.write_bytes(b"")
    elif how == "flipped":
        middle = len(content) // 2
        image.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif how == "another":
        image.write_bytes(b"#!/bin/sh\n" * 1000)
    elif how == "renamed":
        return image.rename(image.with_name("latest.sqsh"))
    elif how == "unrecorded":
        store.record_path(image).unlink()
    elif how == "half a record":
        store.record_path(image).write_text("{")
    elif how == "swapped":
        record = json.loads(store.record_path(image).read_text())
        store.record_path(image).write_text(json.dumps(record | {"file": "x-sha256-000000000000.sqsh"}))
    return image


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "rules", "what", "seen_by_list"),
    [
        ("cut", ["ENR-08", "ENR-08"], "the file is truncated", True),
        ("empty", ["ENR-08", "ENR-08"], "has no squashfs superblock", True),
        ("flipped", ["ENR-08"], "the file was changed: its SHA-256 is", False),
        ("another", ["ENR-08", "ENR-08"], "has no squashfs superblock", True),
        ("renamed", ["ENR-11"], "contains no SHA-256", True),
        ("unrecorded", ["ENR-11"], "is missing, or cannot be read", True),
        ("half a record", ["ENR-11"], "is missing, or cannot be read", True),
        ("swapped", ["ENR-11"], "belongs to another file", True),
    ],
)
def test_damage_of_a_file_is_reported(
    image: Path, capsys: pytest.CaptureFixture[str], how: str, rules: list[str], what: str, seen_by_list: bool
) -> None:
    file = damaged(image, how)
    assert run("verify", str(file), "--json") == 1
    verdict = answers.one(capsys.readouterr().out)
    assert not verdict["passed"] and [fault["rule"] for fault in verdict["findings"]] == rules
    assert what in verdict["findings"][0]["what"]
    assert run("list", "--dir", str(file.parent), "--json") == 0
    listed = next(entry for entry in answers.read(capsys.readouterr().out) if entry["file"] == str(file))
    assert bool(listed["findings"]) == seen_by_list


def flip(image: Path, *, keeping_its_times: bool = False) -> None:
    """Turn a bit of 8 bytes in the middle of a file, under its name and record."""
    times, middle = image.stat(), image.stat().st_size // 2
    image.chmod(0o644)
    with image.open("r+b") as file:
        file.seek(middle)
        eight = file.read(8)
        file.seek(middle)
        file.write(bytes(byte ^ 1 for byte in eight))
    image.chmod(0o444)
    if keeping_its_times:
        os.utime(image, ns=(times.st_atime_ns, times.st_mtime_ns))


def doctors_findings(image: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("CONT", str(image))
    plan = SimpleNamespace(config=SimpleNamespace(container=SimpleNamespace(image="$CONT")))
    outcomes = checks.file(Subject(plan, ""))  # type: ignore[arg-type]
    return [f"{finding.rule} {finding.what}" for finding in outcomes if isinstance(finding, Finding)]


@pytest.mark.long
@pytest.mark.parametrize("keeping_its_times", [False, True])
@pytest.mark.parametrize("is_ours", [True, False])
def test_the_doctor_finds_flipped_bytes_and_reads_an_image_only_once(
    image: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keeping_its_times: bool, is_ours: bool
) -> None:
    """In a writable folder, and in a read-only folder whose images this user has not read yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read: list[Path] = []
    sha256 = atomic_files.sha256
    monkeypatch.setattr(atomic_files, "sha256", lambda path: read.append(path) or sha256(path))
    if not is_ours:
        image.with_suffix(".checked").unlink()
        image.with_suffix(".checked").mkdir()  # root may write everywhere, but not there
        assert doctors_findings(image, monkeypatch) == [] and read.pop() == image
        assert len(list((tmp_path / "cache").rglob("*.checked"))) == 1
    assert doctors_findings(image, monkeypatch) == [] and read == [], "the digest of the import is cached"
    digest = sha256(image)
    flip(image, keeping_its_times=keeping_its_times)
    for _ in range(2):
        (finding,) = doctors_findings(image, monkeypatch)
        assert finding == f"ENR-08 the file was changed: its SHA-256 is {sha256(image)}, but was {digest}"
    assert read == [image]


@pytest.mark.long
@pytest.mark.parametrize("named_by", ["name", "record"])
def test_a_damaged_file_is_not_imported_under_a_new_digest(image: Path, tmp_path: Path, named_by: str) -> None:
    """Its original digest is in the file name (12 digits) or in its record."""
    flip(image)
    if named_by == "name":
        store.record_path(image).unlink()
    with pytest.raises(BenchError, match=r"ENR-08: the file was changed: its SHA-256 is \w+, but its name .* has \w+"):
        bring(image, tmp_path / "others")
    assert contents(tmp_path / "others") == {}
    with pytest.raises(BenchError, match=r"ENR-08: unsquashfs cannot extract files: .*failed to read/uncompress"):
        bring(image.rename(image.with_name("mine.sqsh")), tmp_path / "others")
    assert contents(tmp_path / "others") == {}


@pytest.mark.long
def test_an_import_whose_disk_fails_changes_nothing(squashed: Callable[..., Path], tmp_path: Path) -> None:
    """The folder already has the same image, which is imported again."""
    file, folder = squashed(), tmp_path / "images"
    before = bring(file, folder) and contents(folder)
    number, failed = 0, []
    while True:
        with failing(folder, number) as disk:
            try:
                imported, _ = bring(file, folder, reimport=True)
            except BenchError as error:
                assert "No space left" in str(error), disk.failed
                assert contents(folder) == before, disk.failed
            else:
                assert imported.is_new and store.faults(imported.path) == [], disk.failed
                before = contents(folder)
        if not disk.failed:
            break
        failed.append(disk.failed)
        number += 1
    assert len(failed) > 10
    assert contents(folder).keys() == before.keys()


@pytest.mark.parametrize("engine", ["dockerd", "podman"])
def test_a_missing_daemon_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    (tmp_path / "bin").mkdir()
    for program in ("unsquashfs", "mksquashfs", "enroot"):
        (tmp_path / "bin" / program).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    program = {"dockerd": "docker"}.get(engine, engine)
    with pytest.raises(ConfigError, match=f"{program} is not on PATH"):
        bring(f"{engine}://acme/tiny:1", tmp_path / "images")
    assert not (tmp_path / "images").exists(), "the folder was not created"


@pytest.mark.parametrize(
    ("source", "end", "fix"),
    [
        (
            "dockerd://acme/tiny:1",
            "exit 1",
            "start the daemon, or build the image: `docker image inspect acme/tiny:1` must show the image",
        ),
        ("nvcr.io/nvidia/x:1", "exit 1", "check that nvcr.io has this name and tag; to see details: enroot import -- "),
        ("nvcr.io/nvidia/x:1", "kill -9 $$", "find out what killed Enroot"),
    ],
)
def test_the_fix_of_a_failed_import_depends_on_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, end: str, fix: str
) -> None:
    (tmp_path / "bin").mkdir()
    for program, script in {"enroot": end, "docker": "exit 0"}.items():
        (tmp_path / "bin" / program).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with pytest.raises(BenchError, match="ENR-10") as refused:
        bring(source, tmp_path / "images")
    assert refused.value.fix.startswith(fix)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["image", *argv])
    return int(ended.value.code or 0)


@pytest.mark.long
@pytest.mark.parametrize("how", ["flipped", "cut", "unrecorded"])
def test_a_damaged_image_is_never_reused(image: Path, tmp_path: Path, how: str) -> None:
    content = image.read_bytes()
    damaged(image, how)
    imported, _ = bring(tmp_path / "tiny.sqsh", image.parent)
    assert imported.is_new and imported.path == image and image.read_bytes() == content
    assert store.faults(image) == []


@pytest.mark.long
def test_an_image_for_another_cpu_is_refused_unless_requested(
    squashed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, folder = squashed(), tmp_path / "images"
    other = "aarch64" if HERE == "x86_64" else "x86_64"
    monkeypatch.setattr(platform, "machine", lambda: other)
    with pytest.raises(BenchError, match=f"ENR-07: the image is for {HERE} CPUs, but the nodes have {other} CPUs"):
        bring(file, folder)
    assert list(folder.glob("*.sqsh")) == [] == list(folder.glob(".*.part"))
    imported, _ = bring(file, folder, architecture=HERE)
    assert [fault.rule for fault in store.verify(imported.path, architecture=None)[1]] == ["ENR-07"]
    assert store.verify(imported.path, architecture=HERE)[1] == []


@pytest.mark.long
def test_symbolic_links_in_an_image_read_no_local_files(squashed: Callable[..., Path], tmp_path: Path) -> None:
    file, root = squashed(), tmp_path / "root-tiny.sqsh"
    (tmp_path / "of_host").write_text('{"name": "host"}')
    (tmp_path / "release_of_host").write_text("ID=host\n")
    shutil.rmtree(root / "usr/lib")
    for place, of_host in (("os-release", "release_of_host"), ("runstop-image.json", "of_host")):
        (root / "etc" / place).unlink(missing_ok=True)
        (root / "etc" / place).symlink_to(tmp_path / of_host)
    subprocess.run(["mksquashfs", root, file, "-quiet", "-no-progress", "-noappend", *QUICK], check=True)
    contents_ = squashfs.contents(file)
    assert contents_.os_release is None and contents_.marker is None and contents_.architecture == HERE


@pytest.mark.long
def test_list_shows_files_of_killed_imports(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (image.parent / ".import-node-7.part").write_bytes(b"half")
    (image.parent / f"gone-sha256-{'0' * 12}.json").write_text("{}")
    (image.parent / "link.sqsh").symlink_to("nowhere.sqsh")
    assert run("list", "--dir", str(image.parent)) == 0
    out = capsys.readouterr().out
    assert (
        "incomplete: its import was killed" in out
        and "the image file of this record does not exist" in out
        and "a broken symbolic link" in out
    )
    with (image.parent / store.LOCK).open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run("list", "--dir", str(image.parent))
    assert "incomplete: an import is running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["import", "{tmp}/none.sqsh"], "ENR-07: the file does not exist"),
        (["import", "{tmp}/text.sqsh"], "ENR-08: the file (8 bytes) has no squashfs superblock"),
        (
            ["import", "{tmp}/tiny.sqsh", "--dir", "{tmp}/text.sqsh"],
            "CFG-08: the folder cannot be created: File exists",
        ),
        (["verify", "{tmp}/none.sqsh"], "ENR-07: the file does not exist"),
        (["list", "--dir", "{tmp}/none"], "No such file or directory"),
    ],
)
def test_a_bad_request_changes_nothing(
    squashed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    squashed()
    (tmp_path / "text.sqsh").write_text("no image")
    assert run(*(argument.format(tmp=tmp_path) for argument in argv)) == 2
    assert message in capsys.readouterr().err


def elf(machine: int, *, order: Literal["little", "big"]) -> bytes:
    """Return the first 20 bytes of a 64-bit program. Source: elf(5), e_ident and e_machine."""
    return b"\x7fELF\x02" + bytes([{"little": 1, "big": 2}[order]]) + bytes(12) + machine.to_bytes(2, order)


@pytest.mark.parametrize(
    ("head", "machine"),
    [
        (elf(62, order="little"), "x86_64"),
        (elf(183, order="little") + b"more", "aarch64"),
        (elf(183, order="big"), "aarch64"),
        (elf(62, order="little")[:19], None),
        (b"#!/bin/busybox sh\nexec busybox", None),
        (b"", None),
    ],
)
def test_the_architecture_of_an_image_is_that_of_its_programs(head: bytes, machine: str | None) -> None:
    assert squashfs._machine(head) == machine
