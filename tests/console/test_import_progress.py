"""Progress lines of an image import, which end with the import."""

import threading
from pathlib import Path

import pytest

from bench.console import images


def test_the_state_is_time_and_bytes(tmp_path: Path) -> None:
    part = tmp_path / "image.part"
    assert images.state(part, 61.9) == "importing, 1:01 elapsed, nothing written yet"
    with part.open("wb") as file:
        file.truncate(3 * 2**28)
    assert images.state(part, 600) == "importing, 10:00 elapsed, 0.75 GiB written"


def test_progress_lines_end_with_the_import(tmp_path: Path) -> None:
    lines, came = list[str](), threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        came.set()

    with pytest.raises(OSError, match="full"), images.show_progress(tmp_path / "part", say=say, every_s=0.001):
        assert came.wait(60)
        raise OSError("full")
    assert lines[0].startswith("importing, 0:00 elapsed")
    assert [thread.name for thread in threading.enumerate() if "report_progress" in thread.name] == []
    with images.show_progress(tmp_path / "part", say=lines.clear, every_s=60):  # type: ignore[arg-type]
        pass
    assert lines
