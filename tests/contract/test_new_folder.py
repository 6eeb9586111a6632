"""A folder that is made in several steps is there as a whole or not at all, whichever step fails."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.contract.atomic_files import atomic_folder, existing
from helpers import ranks
from helpers.failing_disk import contents, failing


def make(folder: Path) -> None:
    with atomic_folder(folder) as part:
        (part / "first").write_text("1")
        (part / "deep").mkdir()
        (part / "deep" / "second").write_text("2")


def fails_at_each_step(root: Path, work: Callable[[], None]) -> int:
    """Return how many operations the work takes, each of which fails once and leaves everything as it is."""
    before, number = contents(root), 0
    while True:
        with failing(root, number) as disk:
            try:
                work()
            except OSError:
                assert contents(root) == before, disk.failed
            else:
                assert not disk.failed, disk.failed
                return number
        number += 1


def test_a_failure_leaves_nothing_and_the_next_attempt_succeeds(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    assert fails_at_each_step(tmp_path, lambda: make(tmp_path / "new" / "parents" / "folder")) >= 7
    assert sorted(contents(tmp_path / "new")) == [
        *("parents", "parents/folder", "parents/folder/deep", "parents/folder/deep/second", "parents/folder/first"),
    ]


def test_rows_are_prepared_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from jobs.data import tiny_reports
    from jobs.tasks import prepare

    few = np.ones((2, 8), dtype=np.int32)
    monkeypatch.setattr(tiny_reports, "rows", lambda *numbers, **named: (few, few > 0))
    plan = replace(ranks.compose(tmp_path), data_dir=str(tmp_path / "cache" / "rows"))
    assert fails_at_each_step(tmp_path, lambda: prepare.prepare_rows_of(plan)) >= 7
    assert len(list((tmp_path / "cache" / "rows").iterdir())) == 9


def test_an_interrupt_leaves_nothing_and_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / "folder.part").mkdir()
    (tmp_path / "folder.part" / "half").touch()
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "folder") as part:
        assert not list(part.iterdir())
        (part / "first").touch()
        raise KeyboardInterrupt
    assert contents(tmp_path) == {}


def test_parents_in_use_are_kept(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), existing(tmp_path / "a" / "b"):
        (tmp_path / "a" / "theirs").touch()
        raise OSError("full")
    assert list(contents(tmp_path)) == ["a", "a/theirs"]
