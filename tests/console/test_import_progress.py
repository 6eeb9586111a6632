"""What an import says of itself while it goes on, and that it falls silent with it."""

import threading
from pathlib import Path

import pytest

from bench.console import images


def test_the_state_is_time_and_bytes(tmp_path: Path) -> None:
    part = tmp_path / "image.part"
    assert images.state(part, 61.9) == "importing for 1:01, nothing of the image written yet"
    with part.open("wb") as file:
        file.truncate(3 * 2**28)
    assert images.state(part, 600) == "importing for 10:00, 0.75 GiB of the image written"


def test_lines_come_while_the_work_goes_on_and_not_after(tmp_path: Path) -> None:
    said, came = list[str](), threading.Event()

    def say(line: str) -> None:
        said.append(line)
        came.set()

    with pytest.raises(OSError, match="full"), images.shown(tmp_path / "part", say=say, every_s=0.001):
        assert came.wait(60)
        raise OSError("full")
    assert said[0].startswith("importing for 0:00")
    assert [thread.name for thread in threading.enumerate() if "tell" in thread.name] == []
    with images.shown(tmp_path / "part", say=said.clear, every_s=60):  # type: ignore[arg-type]
        pass
    assert said
