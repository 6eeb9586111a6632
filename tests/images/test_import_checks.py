"""What an import needs is missing: it is refused before it starts."""

from pathlib import Path

import pytest

from bench.errors import ConfigError
from bench.images import import_checks, reference


@pytest.mark.parametrize(
    ("source", "present", "missing"),
    [
        ("ubuntu:24.04", "", "unsquashfs"),
        ("ubuntu:24.04", "unsquashfs", "mksquashfs"),
        ("ubuntu:24.04", "unsquashfs mksquashfs", "enroot"),
        ("dockerd://acme/train:1", "unsquashfs mksquashfs enroot", "docker"),
        ("podman://acme/train:1", "unsquashfs mksquashfs enroot docker", "podman"),
    ],
)
def test_the_first_missing_program_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, present: str, missing: str
) -> None:
    for name in present.split():
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=f"^{missing} is not on PATH"):
        import_checks.require(reference.read(source), tmp_path)
