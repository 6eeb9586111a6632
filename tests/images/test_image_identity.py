"""A run keeps what its image was; the image is read again only where its file is another one."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from bench.contract import atomic_files
from bench.images import store
from bench.images.store import Record

CONTENT = b"an image of 20 GB"


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An imported image with its record, as $CONT names it."""
    path = tmp_path / f"train-sha256-{hashlib.sha256(CONTENT).hexdigest()[:12]}.sqsh"
    path.write_bytes(CONTENT)
    record = {
        "version": 1,
        "file": path.name,
        "source": "example/train:1",
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
    }
    nothing = {"imported": "", "importer": "copy", "architecture": None, "os_release": None, "marker": None}
    store.save(path, Record(**record, **nothing, size_bytes=len(CONTENT)))  # type: ignore[arg-type]
    monkeypatch.setenv("CONT", str(path))
    return path


def test_an_unchanged_image_is_not_read_again(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> str:
        raise AssertionError("20 GB are read")

    monkeypatch.setattr(atomic_files, "sha256", read)
    known = store.identity("$CONT")
    assert known["name"] == "$CONT" and known["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert store.is_unchanged(known) is True


def test_a_copy_is_recognized_by_its_content(image: Path) -> None:
    known = store.identity("$CONT")
    shutil.copy(image, image.with_name("copy"))
    image.with_name("copy").replace(image)
    os.utime(image, ns=(0, known["mtime_ns"]))
    assert image.stat().st_ino != known["inode"] and store.is_unchanged(known) is True
    image.write_bytes(CONTENT[::-1])
    assert store.is_unchanged(known) is False
    image.write_bytes(CONTENT + b"!")
    assert store.is_unchanged(known) is False


def test_an_image_without_a_matching_record_has_no_digest(image: Path) -> None:
    image.write_bytes(CONTENT + b"!")
    known = store.identity(str(image))
    assert (known["sha256"], known["bytes"]) == (None, len(CONTENT) + 1)
    assert store.is_unchanged(known) is True
    os.utime(image, ns=(0, 1))
    assert store.is_unchanged(known) is None, "it cannot be checked without a digest"


@pytest.mark.parametrize("name", ["nvcr.io#nvidia/pytorch:25.11-py3", "$NOT_SET", ""])
def test_an_image_that_is_not_a_file_is_identified_by_name_only(name: str) -> None:
    assert store.identity(name) == {"name": name}
    assert store.is_unchanged({"name": name}) is None
