"""A log may come packed, through a pipe or from stdin; one that is not there is a bad request, whoever asks."""

import gzip
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.cli import arguments, main
from bench.errors import LogError
from helpers.types import MakeLog


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def named(written_log: MakeLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a good log as it comes in one of these ways."""

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
            path.write_bytes(data)
        return path

    return make


@pytest.mark.parametrize("how", ["file", "packed file", "pipe", "packed pipe", "stdin", "packed stdin"])
def test_a_log_is_judged_however_it_comes(
    named: Callable[[str], Path], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = named(how)
    assert run("parse", str(path), "--official", "6.1.0", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["valid"], found["samples_to_target"]) == (str(path), True, 2304)
    assert [verdict["passed"] for verdict in found["official"]] == [True]


def test_a_packed_log_is_replayed_under_its_name(
    named: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = named("packed file")
    assert run("watch", "--replay", str(path), "--once", "--speed", "1e9", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["trials"][0]["name"] == "other.txt"


def test_a_plain_log_is_not_copied(written_log: MakeLog) -> None:
    log = written_log()
    with arguments.plain([log, Path("absent")]) as files:
        assert files == [log, Path("absent")]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:20] + b"\0" * 40 + data[60:]])
def test_a_packed_log_that_is_damaged_is_named(
    written_log: MakeLog, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(damage(gzip.compress(written_log().read_bytes())))
    with pytest.raises(LogError, match=r"cannot be unpacked: .*\n  where: .*log.gz"), arguments.plain([path]):
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
def test_a_file_that_is_not_there_is_a_bad_request(written_log: MakeLog, tmp_path: Path, argv: list[str]) -> None:
    told = {"LOG": str(written_log()), "OUT": str(tmp_path / "package")}
    assert run(*(told.get(word, word) for word in argv)) == 2


def test_a_log_that_is_there_and_proves_nothing_is_no_bad_request(written_log: MakeLog) -> None:
    assert run("parse", str(written_log(status="aborted"))) == 1
