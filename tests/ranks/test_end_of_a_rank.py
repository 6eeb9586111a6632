"""How a rank ends early, with a mocked exit: it closes its log, records its error and kills its children."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench.errors import BenchError, ConfigError
from helpers.paths import ROOT
from jobs.ranks import guard
from jobs.ranks.guard import guarded

Ends = list[tuple[str, object]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Note, in order, what is done to end: signals blocked and unblocked, children killed and waited for, the exit."""
    noted: Ends = []

    def gone() -> None:
        raise psutil.NoSuchProcess(7)

    children = [SimpleNamespace(kill=gone), SimpleNamespace(kill=lambda: noted.append(("killed", 8)))]

    def exited(code: int) -> None:
        noted.append(("exit", code))
        sys.exit(code)

    monkeypatch.setattr(guard, "SIGNAL_POLL_S", 0.001)
    monkeypatch.setattr(signal, "sigpending", set)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, signals: noted.append((how.name, signals)))
    monkeypatch.setattr(psutil.Process, "children", lambda _, recursive: children if recursive else [])
    monkeypatch.setattr(psutil, "wait_procs", lambda waited, timeout: noted.append(("waited", (len(waited), timeout))))
    monkeypatch.setattr(os, "_exit", exited)
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)  # a thread's exit is no failure of the test
    yield noted
    monkeypatch.setattr(guard, "_received", sys.exit)  # which ends the threads that look for signals
    for thread in watching():
        thread.join(60)


def watching() -> list[threading.Thread]:
    """Return the threads that look for signals, the newest last: those of other tests may not have ended yet."""
    return [thread for thread in threading.enumerate() if thread.name == "signals"]


def failed(file: Path, error: BaseException) -> dict[str, Any]:
    """Return the account of a body that raises."""
    with pytest.raises(SystemExit), guarded(file):
        raise error
    return dict(json.loads(file.read_text()))


LAST = [("killed", 8), ("waited", (2, 0.5))]


def test_signals_have_their_default_effect_after_success(ends: Ends, tmp_path: Path) -> None:
    with guarded(tmp_path / "rank_0.error") as begun:
        begun.finish = lambda: ends.append(("closed", None))
        assert ends == [("SIG_BLOCK", {signal.SIGINT, signal.SIGTERM})]
        thread = watching()[-1]
        assert thread.daemon
    thread.join(60)
    assert not thread.is_alive() and ends[1:] == [("SIG_UNBLOCK", {signal.SIGINT, signal.SIGTERM})]
    assert not (tmp_path / "rank_0.error").exists()


def test_an_error_closes_the_log_and_is_recorded(
    ends: Ends, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log may be on a full disk; the error is written anyway, also if its folder is missing."""
    file, error = tmp_path / "rank_logs/rank_3.error", ConfigError("what", where="where", fix="fix", rule="CFG-06")

    def finish() -> None:
        ends.append(("closed", None))
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(SystemExit), guarded(file) as begun:
        begun.finish = finish
        raise error
    account = json.loads(file.read_text())
    assert account.pop("time") == pytest.approx(file.stat().st_mtime, abs=5)
    assert account == {"exit_code": 2, "rule": "CFG-06", "what": "what", "where": "where", "fix": "fix"}
    assert capsys.readouterr().err == f"{error}\n"
    assert ends[1:] == [("closed", None), *LAST, ("exit", 2)]


def test_an_unexpected_error_records_its_traceback(ends: Ends, tmp_path: Path) -> None:
    account = failed(tmp_path / "trial_0_rank_3.error", ValueError("broken"))
    assert account["what"].startswith("Traceback (most recent call last):\n")
    assert account["what"].endswith("\nValueError: broken")
    assert (account["exit_code"], account["rule"], account["where"]) == (1, None, "trial_0_rank_3")
    assert account["fix"] == "read the last lines of the traceback, which is also in rank_logs/"
    assert ends[1:] == [*LAST, ("exit", 1)]


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(("name", "where"), [("result_0.txt", "result_0.txt"), (None, "the run folder")])
def test_a_full_disk_is_reported(tmp_path: Path, name: str | None, where: str) -> None:
    """Other OSErrors have no rule."""
    account = failed(tmp_path / "rank_0.error", OSError(errno.EDQUOT, "Disk quota exceeded", name))
    assert (account["rule"], account["what"]) == ("CFG-08", "cannot write: Disk quota exceeded")
    assert (account["where"], account["fix"]) == (where, "free disk space, or set LOGDIR to another disk")
    assert failed(tmp_path / "rank_0.error", OSError(errno.EIO, "I/O error", name))["rule"] is None


def test_a_rank_ends_even_if_its_error_cannot_be_written(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_logs").write_text("a file where the folder should be")
    with pytest.raises(SystemExit), guarded(tmp_path / "rank_logs/rank_0.error"):
        raise BenchError("what", where="where", fix="fix")
    assert ends[-1] == ("exit", 1) and capsys.readouterr().err == "what\n  where: where\n  fix:   fix\n"
    monkeypatch.setattr(guard.json, "dumps", lambda account: 1 / 0)
    with pytest.raises(SystemExit), guarded(tmp_path / "rank_0.error"):
        raise BenchError("what", where="where", fix="fix")
    assert ends[-1] == ("exit", 1)


@pytest.mark.parametrize("reason", ["signals", "the end of its launcher"])
def test_a_rank_closes_its_log_before_it_ends_on_a_signal(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Of several signals the lowest number counts; the end of the launcher counts as SIGTERM."""
    with guarded(tmp_path / "rank_0.error") as begun:
        begun.finish = lambda: ends.append(("closed", None))
        if reason == "signals":
            pending = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
            monkeypatch.setattr(signal, "sigpending", lambda: pending)
        else:
            monkeypatch.setattr(os, "getppid", lambda: 1)
        watching()[-1].join(60)
    expected = 128 + (signal.SIGINT if reason == "signals" else signal.SIGTERM)
    assert ends[1:5] == [("closed", None), *LAST, ("exit", expected)]


def test_a_failing_rank_ends_with_its_own_error(ends: Ends, tmp_path: Path) -> None:
    """The thread that ends the process holds the lock: a signal that arrives meanwhile changes nothing."""
    begun = guard.Guard(tmp_path / "rank_0.error")
    held: list[bool] = []
    begun.finish = lambda: held.append(begun.ending.locked())
    with pytest.raises(SystemExit) as ended:
        begun.fail(BenchError("what", where="where", fix="fix"))
    assert ended.value.code == 1 and held == [True]
    assert guard.Guard.finish() is None, "by default there is nothing to close"


def test_last_words_reach_the_error_output_and_what_waits_is_written(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(sys.stdout, "flush", lambda: flushed.append("stdout"))
    with pytest.raises(SystemExit) as ended:
        guard._exit(3, "last words")
    assert ended.value.code == 3 and flushed == ["stdout"] and capsys.readouterr().err == "last words"
    assert ends == [*LAST, ("exit", 3)]


@pytest.mark.starts
def test_a_rank_exits_without_the_shutdown_of_python(tmp_path: Path) -> None:
    """A thread that still runs, as those of a group that a library keeps, does not see the interpreter end."""
    registered = tmp_path / "registered"
    code = (
        "import atexit, os, pathlib, sys\n"
        "from jobs.ranks import guard\n"
        f"atexit.register(pathlib.Path({str(registered)!r}).touch)\n"
        "class Kept:\n    def __del__(self, write=os.write): write(1, b' and the shutdown of Python')\n"
        "sys.kept = Kept()\n"
        "print('last line', end='')\n"
        "guard.exit_process()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    argv = [sys.executable, "-c", code]
    ended = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "last line"), ended.stderr
    assert registered.exists()
