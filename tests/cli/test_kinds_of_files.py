"""Logs as gzip files, pipes and stdin; every verb exits with 2 for a missing file."""

import gzip
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.cli import arguments, main
from bench.errors import LogError
from helpers import answers
from helpers.types import MakeLog


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def named(written_log: MakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a valid log in one of these forms."""

    def make(how: str) -> Path:
        log = written_log()
        data = gzip.compress(log.read_bytes()) if "packed" in how else log.read_bytes()
        if "stdin" in how:
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
            return Path("-")
        path = tmp_path / ("other.txt.gz" if "packed" in how else "other.txt")
        if "pipe" in how:
            os.mkfifo(path)
            threading.Thread(target=path.write_bytes, args=(data,), daemon=True).start()
        else:
            path.write_bytes(b'{"step": 1}\n' + data if "brace" in how else data)
        return path

    return make


@pytest.mark.parametrize(
    "how", ["file", "packed file", "pipe", "packed pipe", "stdin", "packed stdin", "file that begins with a brace"]
)
def test_log_is_read_from_file_pipe_or_stdin(
    named: Callable[[str], Path], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = named(how)
    assert run("parse", str(path), "--official", "6.1.0", "--json") == 0
    record = answers.one(capsys.readouterr().out)
    assert (record["file"], record["valid"], record["samples_to_target"]) == (str(path), True, 2304)
    assert [verdict["passed"] for verdict in record["official"]] == [True]


def test_gzip_log_is_replayed_with_its_name(named: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = named("packed file")
    assert run("watch", "--replay", str(path), "--once", "--speed", "1e9", "--json") == 0
    assert answers.read(capsys.readouterr().out)[0]["trials"][0]["name"] == "other.txt"


def test_a_plain_log_is_not_copied(written_log: MakeLog) -> None:
    log = written_log()
    with arguments.plain([log, Path("absent")]) as files:
        assert files == [log, Path("absent")]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:20] + b"\0" * 40 + data[60:]])
def test_damaged_gzip_log_is_reported(written_log: MakeLog, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(damage(gzip.compress(written_log().read_bytes())))
    with pytest.raises(LogError, match=r"cannot be decompressed: .*\n  where: .*log.gz"), arguments.plain([path]):
        pass


@pytest.mark.parametrize(
    "argv",
    [
        ["parse", "absent.txt"],
        ["parse", "absent.txt", "--official", "6.1.0"],
        ["parse", "LOG", "absent.txt"],
        ["parse", "absent.txt", "LOG"],
        ["watch", "--replay", "absent.txt", "--once"],
        ["why", "absent.txt"],
        ["score", "absent"],
        ["report", "absent.txt"],
        ["pack", "absent", "-o", "OUT", "--org", "example"],
    ],
    ids=" ".join,
)
def test_missing_file_exits_with_two(written_log: MakeLog, tmp_path: Path, argv: list[str]) -> None:
    paths = {"LOG": str(written_log()), "OUT": str(tmp_path / "package")}
    assert run(*(paths.get(argument, argument) for argument in argv)) == 2


def test_a_run_is_parsed_and_replayed_by_its_name(
    written_log: MakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOGDIR", str(tmp_path / "runs"))
    run_folder = tmp_path / "runs" / "a-run"
    run_folder.mkdir(parents=True)
    (run_folder / "plan.json").write_text("{}")
    assert (
        run("parse", "a-r") == 2 and "this run folder has no logs of trials (result_*.txt)" in capsys.readouterr().err
    )
    data = written_log().read_bytes()
    for number in (0, 10, 2):
        (run_folder / f"result_{number}.txt").write_bytes(data)
    assert run("parse", "latest", "--json") == 0
    files = [one["file"] for one in answers.read(capsys.readouterr().out)]
    assert files == [str(run_folder / f"result_{number}.txt") for number in (0, 2, 10)]
    assert run("watch", "--replay", "a-run", "--once") == 0
    assert run("watch", "--replay", str(run_folder), "--once") == 2


def test_invalid_log_exits_with_one(written_log: MakeLog) -> None:
    assert run("parse", str(written_log(status="aborted"))) == 1
