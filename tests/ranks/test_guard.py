"""How a rank ends early."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.starts

RANK = """
import subprocess
from pathlib import Path
from jobs.ranks.guard import guarded

with guarded(Path("rank.error")):
    own = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(own.pid, flush=True)
    raise ValueError("broken")
"""


def test_a_failing_rank_kills_its_child_processes(tmp_path: Path) -> None:
    """Child processes, such as torch's compilers, would keep the run folder's file system busy."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RANK], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: broken" in done.stderr
    assert not psutil.pid_exists(int(done.stdout))


TWICE = """
import threading, time
from pathlib import Path
from bench.errors import BenchError
from jobs.ranks.guard import guarded

with guarded(Path("rank.error")) as guard:
    first = threading.Event()
    guard.finish = lambda: (first.set(), time.sleep(threading.current_thread() is not threading.main_thread()))
    stalled = BenchError("the ranks stalled", where="here", fix="look", rule="RUN-17")
    threading.Thread(target=guard.fail, args=(stalled,)).start()
    first.wait()
    raise ConnectionError("closed by peer")
"""


def test_the_first_of_two_errors_is_recorded(tmp_path: Path) -> None:
    """The watchdog ends the trial; an error in the main thread that follows from it does not replace its error."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TWICE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "closed by peer" not in done.stderr
    assert json.loads((tmp_path / "rank.error").read_text())["rule"] == "RUN-17"


FULL = """
import errno, threading
from pathlib import Path
from jobs.ranks.guard import guarded

with guarded(Path("rank.error")) as guard:
    full = OSError(errno.ENOSPC, "No space left on device", "result_0.txt")
    threading.Thread(target=guard.fail, args=(full,)).start()
    threading.Event().wait()
"""


def test_a_rank_records_its_error_even_if_it_cannot_print(tmp_path: Path) -> None:
    """Its output is a file on the full disk."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, env=environment, stderr=full, timeout=60)
    assert done.returncode == 1
    assert json.loads((tmp_path / "rank.error").read_text())["rule"] == "CFG-08"


SIGNALLED = """
import os, signal, threading, time
from pathlib import Path
from jobs.ranks.guard import guarded

def finish():
    if threading.current_thread() is threading.main_thread():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2)

with guarded(Path("rank.error")) as guard:
    guard.finish = finish
    raise ValueError("broken")
"""


def test_a_failing_rank_records_its_error_although_it_receives_sigterm(tmp_path: Path) -> None:
    """The launcher ends the others as soon as one rank has failed; this one's log takes a while to close."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SIGNALLED], cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 1
    assert "ValueError: broken" in json.loads((tmp_path / "rank.error").read_text())["what"]


HANGS = """
import atexit, time
from pathlib import Path
from jobs.ranks.guard import guarded

atexit.register(lambda: (print("shuts down", flush=True), time.sleep(600)))
with guarded(Path("rank.error")):
    pass
"""


def test_a_rank_that_hangs_after_its_work_ends_on_sigterm(tmp_path: Path) -> None:
    """Python shuts down, which may wait for a thread or a library of a device that does not answer."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", HANGS], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as rank:
        try:
            assert rank.stdout and rank.stdout.readline() == "shuts down\n"
            rank.terminate()
            assert rank.wait(timeout=30) == -signal.SIGTERM
        finally:
            rank.kill()


UNREAD = """
import os, signal, sys, time
from pathlib import Path
from jobs.ranks.guard import guarded

with guarded(Path("rank.error")):
    print("more than the pipe takes")
    {ends}
"""


@pytest.mark.parametrize(
    ("ends", "exit_code"),
    [("raise ValueError", 1), ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)", 128 + signal.SIGTERM)],
)
def test_a_rank_ends_even_if_its_output_is_not_read(tmp_path: Path, ends: str, exit_code: int) -> None:
    """A stopped launcher does not read the pipe, so that a write of the rank would block forever."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", UNREAD.format(ends=ends)]
    try:
        done = subprocess.run(command, cwd=tmp_path, env=environment, stdout=writer, stderr=writer, timeout=60)
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == exit_code
