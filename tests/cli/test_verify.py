"""`verify` reports changed files of run folders, and its exit code tells whether there are any."""

from pathlib import Path

import pytest

from bench.cli import main
from bench.planning import compose
from helpers import answers, planted_runs


def run(*argv: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in argv])
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run whose only trial was aborted before it had a log, with the facts of two ranks."""
    plan, folder = compose.compose(["task=lora_tiny", "cluster=local"]), tmp_path / "run"
    (folder / "facts").mkdir(parents=True)
    for rank in (0, 1):
        (folder / f"facts/rank_000{rank}.json").write_text("{}")
    return planted_runs.abort(folder, plan)


def test_a_run_is_verified_in_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", folder) == 0
    title, columns, *rows = capsys.readouterr().out.splitlines()
    assert (title, columns) == (f"{folder}: verified", "what\texpected\tactual\tverified")
    assert "facts/\t2 files\tas expected\tyes" in rows
    assert "trial 0\t\taborted: its log was not judged\t" in rows


def test_mismatches_come_first(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "facts/rank_0001.json").write_text("[]")
    assert run("verify", folder) == 1
    rows = capsys.readouterr().out.splitlines()
    empty = {"{}": "44136fa355b3…", "[]": "4f53cda18c2b…"}  # as sha256sum prints them
    assert rows[0] == f"{folder}: not verified"
    assert rows[2] == f"facts/rank_0001.json\t2 bytes, sha256 {empty['{}']}\t2 bytes, sha256 {empty['[]']}\tno"
    assert "facts/\t1 file\tas expected\tyes" in rows


def test_several_runs_as_json(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved/status.json").unlink()
    assert run("verify", tmp_path / "moved", tmp_path / "moved", "--json") == 1
    first, second = answers.read(capsys.readouterr().out)
    assert first == second and first["passed"] is False
    (bad,) = [each for each in first["checks"] if each["passed"] is False]
    assert (bad["what"], bad["actual"]) == ("status.json", "missing, or a symbolic link")


def test_folder_without_a_run_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", tmp_path) == 2
    assert "this folder is not a run folder" in capsys.readouterr().err
