"""`rm` and `gc`: what may be deleted, that nothing else is touched, and what an interruption leaves."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from bench.cli import main
from bench.errors import ConfigError
from bench.runs import ledger, names, removal, tags
from bench.runs import status as statuses
from bench.runs.ledger import Entry, Outcome
from bench.runs.status import Ending, Status
from helpers.hostile_folders import OTHER_USER_ID

OLD_S = 40 * 86400


_held: list[IO[str]] = []


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGDIR", raising=False)
    monkeypatch.setenv("PATH", "/nosuch")  # no Slurm
    yield
    while _held:
        _held.pop().close()


def plant(name: str, ending: Ending | None, *outcomes: Outcome, root: str = "runs") -> Path:
    """Write a run of this machine that has ended so; None for a run without a final status."""
    folder = Path(root, name)
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    ledger._write(folder, [Entry(trial=n, seed=n, outcome=outcome) for n, outcome in enumerate(outcomes)])
    if ending is not None:
        statuses.write(folder, Status(outcome=ending, exit_code=0 if ending is Ending.valid else 1))
    return folder


def age(folder: Path, seconds: float = OLD_S) -> Path:
    """Make a folder with all that is in it older."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (time.time() - seconds,) * 2, follow_symlinks=False)
    return folder


def code_of(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    return int(stop.value.code or 0)


def test_a_run_is_deleted_and_what_its_links_lead_to_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    outside = Path("outside")
    (outside / "kept").mkdir(parents=True)
    (outside / "kept" / "data").write_text("x" * 5000)
    run, other = plant("a-run", Ending.valid, Outcome.valid), plant("other", Ending.valid, Outcome.valid)
    (run / "folder_link").symlink_to(outside.absolute())
    (run / "file_link").symlink_to((outside / "kept" / "data").absolute())
    os.link(outside / "kept" / "data", run / "hard")
    assert code_of("rm", "a-run", "--dry-run") == 0 and run.exists()
    assert code_of("rm", "a-run") == 2, "stdin is not a terminal"
    assert run.exists() and "add --yes" in capsys.readouterr().err
    assert code_of("rm", "a-r", "--yes") == 2, "a part of a name is not enough"
    assert code_of("rm", "a-run", "--yes") == 0
    assert sorted(Path("runs").iterdir()) == [other] and (outside / "kept" / "data").read_text() == "x" * 5000
    assert "deleted runs/a-run" in capsys.readouterr().out


def _locked(run: Path) -> object:
    _held.append((run / ".run.lock").open("w"))
    return fcntl.flock(_held[-1], fcntl.LOCK_EX)


def _in_a_queue(run: Path) -> object:
    (run / "status.json").unlink()
    return (run / "job.json").write_text(json.dumps({"backend": "slurm", "jobs": [{"id": "7"}]}))


def _requeued(run: Path) -> object:
    statuses.write(run, Status(outcome=Ending.interrupted, exit_code=143))
    return (run / "job.json").write_text(json.dumps({"backend": "slurm", "jobs": [{"id": "7"}]}))


def _of_a_study_under_way(run: Path) -> object:
    (run.parent / "study.yaml").touch()
    return _locked(run.parent)


def _with_a_linked_plan(run: Path) -> object:
    (run / "plan.json").unlink()
    return (run / "plan.json").symlink_to("/etc/passwd")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a process drives it": (_locked, "the run is active"),
    "its queue cannot be queried": (_in_a_queue, "this machine cannot find out whether the run is active"),
    "its job may be queued again": (_requeued, "this machine cannot find out whether the run is active"),
    "its submission was cut short": (lambda run: (run / ".submission").touch(), "the submission of this run"),
    "its study is under way": (_of_a_study_under_way, "a process is working on the study"),
    "all can write to it": (lambda run: run.chmod(0o777), "CFG-11"),
    "its plan is a link": (_with_a_linked_plan, "CFG-11"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_run_that_may_be_alive_or_not_ours_is_kept(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    change, what = REFUSED[how]
    fine, run = plant("fine", Ending.failed), plant("run", Ending.failed)
    change(run)
    assert code_of("rm", "fine", "run", "--yes") == 2 and what in capsys.readouterr().err
    assert run.exists() and fine.exists(), "all are checked before the first one is deleted"
    age(run), age(fine)
    left = removal.garbage(Path("runs"), older_than_days=30)
    assert [one.path for one in left if one.path != fine] == []


def test_a_link_to_a_run_is_refused_and_so_is_another_users(capsys: pytest.CaptureFixture[str]) -> None:
    run = plant("run", Ending.failed)
    Path("runs/link").symlink_to(run.absolute())
    assert code_of("rm", "runs/link", "--yes") == 2 and "symbolic link" in capsys.readouterr().err
    if os.geteuid() == 0:
        os.chown(run, OTHER_USER_ID, OTHER_USER_ID)
        assert code_of("rm", "runs/run", "--yes") == 2 and "another user owns" in capsys.readouterr().err
        leftover = Path("runs/.history.sqlite.x1")
        leftover.touch()
        os.chown(leftover, OTHER_USER_ID, OTHER_USER_ID)
        age(Path("runs"))
        assert removal.garbage(Path("runs"), older_than_days=30) == [], "nothing of another user is deleted"
    assert run.exists()


def test_a_linked_folder_of_deletions_is_neither_emptied_nor_used() -> None:
    run, outside = plant("run", Ending.failed), Path("outside")
    (outside / "kept").mkdir(parents=True)
    Path("runs/.removed").symlink_to(outside.absolute())
    age(Path("runs")), age(outside)
    assert [one.path for one in removal.garbage(Path("runs"), older_than_days=30)] == [run]
    with pytest.raises(ConfigError, match="this path is not a folder of this user"):
        removal.remove(removal.of_run(run))
    assert run.exists() and (outside / "kept").exists()


def test_incomplete_adapters_of_a_linked_run_are_kept() -> None:
    Path("runs").mkdir()
    run = plant("run", Ending.valid, Outcome.valid, root="elsewhere")
    (run / "adapters_0.part").mkdir()
    Path("runs/link").symlink_to(run.absolute())
    age(run), age(Path("runs"))
    assert removal.garbage(Path("runs"), older_than_days=30) == []
    assert [one.path.name for one in removal.garbage(Path("elsewhere"), older_than_days=30)] == ["adapters_0.part"]


def test_incomplete_checkpoints_behind_a_link_are_kept() -> None:
    """Also if the link is above the folder of the trial."""
    run = plant("run", Ending.valid, Outcome.valid)
    scratch = Path("scratch/trial_0/step_9.part")
    scratch.mkdir(parents=True)
    (run / "checkpoints").symlink_to(Path("scratch").absolute())
    linked = plant("linked", Ending.valid, Outcome.valid, root="elsewhere")
    (linked / "checkpoints/trial_0/step_9.part").mkdir(parents=True)
    Path("runs/link").symlink_to(linked.absolute())
    for one in (run, linked, scratch):
        age(one)
    assert removal.garbage(Path("runs"), older_than_days=30) == []
    assert [one.path.name for one in removal.garbage(Path("elsewhere"), older_than_days=30)] == ["step_9.part"]


def test_a_run_with_another_file_system_in_it_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lstat = plant("run", Ending.failed), Path.lstat
    (run / "mounted").mkdir()
    monkeypatch.setattr(
        Path, "lstat", lambda path: SimpleNamespace(st_dev=-1) if path.name == "mounted" else lstat(path)
    )
    assert code_of("rm", "run", "--yes") == 2
    refused = f"another file system is mounted in this folder\n  where: {run.resolve()}/mounted\n"
    assert refused in capsys.readouterr().err and run.exists()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupted_deletion_leaves_the_run_or_nothing_like_one(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = plant("run", Ending.failed), [0]

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **more: object) -> object:
            calls[0] += 1
            if calls[0] > at:
                raise KeyboardInterrupt
            return original(*args, **more)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", counted(Path.rename))
        patched.setattr(Path, "unlink", counted(Path.unlink))
        patched.setattr(shutil, "rmtree", counted(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            removal.remove(removal.of_run(run))
    assert names.below(Path("runs")) == ([run] if at == 0 else [])
    assert run.exists() == (at == 0)
    if at:
        left = next(Path("runs/.removed").iterdir())
        assert removal.garbage(Path("runs"), older_than_days=30) == [], "it may be under way"
        age(left, 7200)
        (removable,) = removal.garbage(Path("runs"), older_than_days=30)
        assert removable.what == "interrupted deletion"
        removal.remove(removable)
        assert list(Path("runs").iterdir()) == []


@pytest.mark.long
def test_gc_takes_only_what_is_of_no_use() -> None:
    Path("runs").mkdir()
    failed = plant("failed", Ending.failed, Outcome.aborted)
    killed = Path("runs/killed")
    killed.mkdir()
    (killed / "plan.json").write_text("{}")
    tagged, noted = plant("tagged", Ending.failed), plant("noted", Ending.failed)
    tags.change(tagged, add=["keep"])
    tags.change(noted, note="why it failed")
    (plant("signed", Ending.failed) / "manifest.json.sig").touch()
    plant("valid", Ending.valid, Outcome.valid)
    plant("partly", Ending.failed, Outcome.valid, Outcome.aborted)
    plant("interrupted", Ending.interrupted, Outcome.interrupted)
    resumable = plant("resumable", Ending.failed, Outcome.aborted)
    (resumable / "checkpoints/trial_0/step_8").mkdir(parents=True)
    incomplete = plant("ended", Ending.valid, Outcome.valid) / "checkpoints/trial_0/step_9.part"
    incomplete.mkdir(parents=True)
    (incomplete / "x.distcp").write_bytes(bytes(1 << 20))
    unended = plant("unended", None, Outcome.running) / "checkpoints/trial_0/step_9.part"
    unended.mkdir(parents=True)
    Path("runs/array").mkdir()
    Path("runs/array/job.json").write_text('{"backend": "local", "jobs": [], "runs": ["gone"]}')
    Path("runs/array2").mkdir()
    Path("runs/array2/job.json").write_text('{"backend": "local", "jobs": [], "runs": ["gone", "valid"]}')
    Path("runs/.history.sqlite.x1").touch()
    Path("runs/cache").mkdir()
    age(Path("runs"))
    fresh = plant("fresh", Ending.failed)
    removable = removal.garbage(Path("runs"), older_than_days=30)
    expected = [Path("runs/.history.sqlite.x1"), Path("runs/array"), incomplete, failed, killed]
    assert [one.path for one in removable] == sorted(expected)
    assert next(one.bytes for one in removable if one.path == incomplete) >= 1 << 20
    before = set(Path("runs").iterdir())
    assert code_of("gc", "--yes") == 0
    assert before - set(Path("runs").iterdir()) == {*expected} - {incomplete}
    assert fresh.exists() and not incomplete.exists() and removal.garbage(Path("runs"), older_than_days=30) == []


def test_a_process_that_resumes_the_run_meanwhile_wins() -> None:
    run = plant("run", Ending.failed)
    removable = removal.of_run(run)
    _locked(run)
    with pytest.raises(ConfigError, match="another process is already working on this folder"):
        removal.remove(removable)
    assert run.exists()
