"""Programs that an import runs: what is kept of their words, and that nothing of them is left."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from bench.images import tools


def test_what_a_program_says_is_heard_line_by_line_and_its_end_is_kept() -> None:
    heard: list[str] = []
    ended = tools.run(["sh", "-c", "echo out; printf 'one\\ttab\\n\\033[1mtwo\\n' >&2; exit 3"], listen=heard.append)
    assert (ended.exit_code, ended.lines) == (3, heard) and len(heard) == 2
    assert heard[0] == "one tab" and "\x1b" not in heard[1]


@pytest.mark.parametrize(("trap", "grace_s"), [("", 30.0), ("trap '' TERM;", 0.05)])
def test_who_leaves_early_ends_the_program_and_all_that_it_started(
    trap: str, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that take no notice of SIGTERM."""
    monkeypatch.setattr(tools, "GRACE_S", grace_s)
    started: list[int] = []

    def listen(line: str) -> None:
        started.extend(map(int, line.split()))
        raise KeyboardInterrupt

    signals = []
    real = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: signals.append(number) or real(group, number))
    with pytest.raises(KeyboardInterrupt):
        tools.run(["sh", "-c", f"{trap} sleep 60 & echo $$ $! >&2; while :; do sleep 0.01; done"], listen=listen)
    until_s = time.monotonic() + 30
    while any(is_running(pid) for pid in started):
        assert time.monotonic() < until_s, started
    assert len(started) == 2
    assert signals == [signal.SIGTERM, *([signal.SIGKILL] if trap else [])]


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_version_of_a_missing_or_failing_program_is_unknown(tmp_path: Path) -> None:
    for name, script in (("good", "echo 3.4.1"), ("bad", "echo 3; exit 1"), ("silent", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    versions = [tools.version(str(tmp_path / name)) for name in ("good", "bad", "silent", "absent")]
    assert versions == ["3.4.1", None, None, None]
