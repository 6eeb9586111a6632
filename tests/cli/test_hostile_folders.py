"""Every verb on run folders of a hostile author: it ends, with a message, without acting on what it has read."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from bench.cli import arguments, main
from bench.contract import regular_files
from bench.dashboard import app as dashboard
from bench.errors import BenchError, ConfigError, SubmitError
from bench.launch import resume
from bench.runs import folder as folders
from helpers.clock import Clock
from helpers.hostile_folders import ESCAPES, HOSTILE, OTHER_USER_ID, UNOWNED, honest, release
from helpers.paths import ROOT

LIMIT_S = 10
"""For one verb: what blocks or reads without end is stopped."""
VERBS: dict[str, Callable[[Path], list[object]]] = {
    "runs": lambda run: [run.parent],
    "history": lambda run: ["--folder", run.parent],
    "why": lambda run: [run],
    "logs": lambda run: [run],
    "watch": lambda run: ["--once", run],
    "parse": lambda run: [run / "result_0.txt"],
    "goodput": lambda run: [run],
    "score": lambda run: [run],
    "report": lambda run: [run],
    "compare": lambda run: [run, run],
    "verify": lambda run: [run],
    "sign": lambda run: [run, "--key", run / "plan.json"],
    "pack": lambda run: [run, "-o", run.parent.parent / "pack", "--org", "lab"],
    "cancel": lambda run: [run],
    "resume": lambda run: [run],
    "tag": lambda run: [run],
    "rerun": lambda run: [run, "launch.dry_run=true"],
    "rm": lambda run: [run, "--dry-run"],
    "gc": lambda run: [run.parent, "--older-than", "0.000001", "--dry-run"],
}


class Calls:
    """Stubs of Slurm's commands on PATH, which record their names; the queue has job 8, of another run."""

    def __init__(self, folder: Path) -> None:
        self.bin, self._record = folder / "bin", folder / "calls"
        self.bin.mkdir()
        self._record.touch()
        queue = 'case "$*" in *Command*) echo "8|/x/job.sbatch /x|";; *8*) echo "8|RUNNING|||0|0:01|1:00|N/A|";; esac'
        for name, body in (("squeue", queue), ("sacct", ":"), ("sbatch", "exit 1"), ("scancel", ":"), ("ray", ":")):
            (self.bin / name).write_text(f'#!/bin/sh\necho {name} >>"{self._record}"\n{body}\n')
            (self.bin / name).chmod(0o755)

    def names(self) -> set[str]:
        return set(self._record.read_text().split())


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest(tmp_path_factory.mktemp("honest") / "run", Clock())


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(tmp_path)
    monkeypatch.setenv("PATH", f"{calls.bin}:/usr/bin:/bin")
    monkeypatch.setattr(arguments, "WRITER_S", 0.1)
    return calls


@pytest.fixture
def deeds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a verb does to others: connections and signals, which are recorded and refused."""
    deeds: list[str] = []

    def refuse(name: str) -> Callable[..., object]:
        def refused(*args: object, **more: object) -> object:
            deeds.append(f"{name} {args[-2:]}")
            raise OSError(f"{name} is refused here")

        return refused

    monkeypatch.setattr(socket.socket, "connect", refuse("connect"))
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, refuse(name))
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse("signal"))
    return deeds


@pytest.fixture
def in_time() -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise AssertionError(f"a verb took more than {LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, stop)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    release()


def contents(run: Path) -> dict[str, tuple[int, int, int]]:
    """Return mode, size and time of each path of a folder, without the locks that verbs create."""
    paths = (path for path in sorted(run.rglob("*")) if not path.name.endswith(".lock"))
    return {
        str(path): (status.st_mode, status.st_size, status.st_mtime_ns) for path in paths if (status := path.lstat())
    }


@pytest.mark.long
@pytest.mark.parametrize("how", HOSTILE)
def test_every_verb_reads_a_hostile_folder_and_does_nothing(
    how: str,
    template: Path,
    tmp_path: Path,
    calls: Calls,
    deeds: list[str],
    in_time: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(template, tmp_path / "runs" / "run")
    HOSTILE[how](run)
    before = contents(run)
    for verb, words in VERBS.items():
        signal.alarm(LIMIT_S)
        with pytest.raises(SystemExit) as stop:
            main([verb, *map(str, words(run))])
        signal.alarm(0)
        printed = "".join(capsys.readouterr())
        assert stop.value.code in (0, 1, 2) and "Traceback" not in printed, (verb, printed)
        assert not [letter for letter in printed if not letter.isprintable() and letter not in "\n\t"], (verb, printed)
        assert contents(run) == before and deeds == [], (verb, deeds)
        if verb in ("cancel", "resume", "rerun", "rm") and how in UNOWNED and os.geteuid() == 0:
            assert stop.value.code == 2 and "CFG-11" in printed, (verb, printed)
    assert "scancel" not in calls.names()
    assert "sbatch" not in calls.names() or how not in UNOWNED


def test_compare_checks_each_run_of_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As every verb checks the runs that it is given: none is read whose name would control the terminal."""
    (tmp_path / f"fp8{ESCAPES}").mkdir()
    (tmp_path / f"fp8{ESCAPES}" / "plan.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        main(["compare", f"{tmp_path}/*fp8*", f"{tmp_path}/*fp8*"])
    printed = "".join(capsys.readouterr())
    assert stop.value.code == 2 and "the path contains control characters" in printed
    assert not [letter for letter in printed if not letter.isprintable() and letter not in "\n\t"]


@pytest.mark.long
def test_the_dashboard_shows_hostile_folders_and_does_nothing(
    template: Path, tmp_path: Path, calls: Calls, deeds: list[str], in_time: None
) -> None:
    """All of them in one list: each page has an answer in time, is one page of ours, and loads nothing of theirs."""
    root = tmp_path / "runs"
    for number, how in enumerate(HOSTILE):
        HOSTILE[how](shutil.copytree(template, root / f"run{number}"))
    before = contents(root)
    browser = TestClient(dashboard.app(root, "token"), base_url="http://localhost:8790")
    signal.alarm(6 * LIMIT_S)  # reads every folder of the list
    listed = browser.get("/?token=token")
    ids = re.findall(r'data-run="(\w+)"', listed.text)
    assert len(ids) > len(HOSTILE) - 10, "few have no name that can be shown, or are no run folders any more"
    pages = [listed, browser.get("/history")]
    for id in ids:
        for path in (f"/run/{id}", f"/live/{id}", f"/compare?run={id}&run={ids[0]}"):
            signal.alarm(LIMIT_S)
            pages.append(browser.get(path))
    signal.alarm(0)
    assert {page.status_code for page in pages} <= {200, 409} and deeds == []
    assert contents(root) == before and not calls.names() & {"sbatch", "scancel"}
    for page in pages:
        assert "\x1b" not in page.text and "\u202e" not in page.text, page.url
        if page.headers["content-type"].startswith("text/html"):
            sources = re.findall(r'<(?:script|img|link|iframe|object)[^>]*(?:src|href)="([^"]*)"', page.text)
            assert all(source.startswith(("/assets/", "data:,")) for source in sources), sources
            assert page.text.count("<script") == 4, "three of ours, and the charts"


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(HOSTILE) >= 50


@pytest.mark.long
def test_the_honest_folder_is_read_by_every_verb(
    template: Path, tmp_path: Path, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the corpus would show only that everything is refused."""
    run, codes = shutil.copytree(template, tmp_path / "runs" / "run"), {}
    for verb in ("runs", "history", "why", "logs", "watch", "parse", "goodput", "report", "verify"):
        with pytest.raises(SystemExit) as stop:
            main([verb, *map(str, VERBS[verb](run))])
        codes[verb] = stop.value.code, capsys.readouterr()
    assert {code for code, _ in codes.values()} == {0}, codes


@pytest.mark.starts
@pytest.mark.parametrize("verb", VERBS)
def test_a_process_in_a_hostile_folder_imports_nothing_from_it(verb: str, template: Path, tmp_path: Path) -> None:
    run = shutil.copytree(template, tmp_path / "runs" / "run")
    for how in ("Python modules", "names with escapes", "ledger.json is a pipe", "rank_logs/trial_0.out is a pipe"):
        HOSTILE[how](run)
    calls = Calls(tmp_path)
    environment = {"PATH": f"{calls.bin}:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f":{ROOT}"}
    words = [sys.executable, "-m", "bench", verb, *map(str, VERBS[verb](run))]
    done = subprocess.run(words, cwd=run, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1, 2) and "Traceback" not in done.stderr, done
    assert "\x1b" not in done.stdout + done.stderr and not calls.names() & {"scancel", "sbatch"}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_the_folder_of_another_user_is_read_with_a_note(
    template: Path, tmp_path: Path, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(template, tmp_path / "runs" / "run")
    os.chown(run, OTHER_USER_ID, OTHER_USER_ID)
    with pytest.raises(SystemExit) as stop:
        main(["why", str(run)])
    assert stop.value.code == 0 and " owns this folder; this command only reads the folder\n" in capsys.readouterr().err


def test_ray_is_queried_only_at_an_address_that_this_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that was copied is this user's, and its job.json is still its author's: no token is sent there."""
    requests: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.headers.get("Authorization"))
            self.send_error(404)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 40)
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("bench.backends.ray.client.is_available", lambda: True)
    reached: list[str] = []
    monkeypatch.setattr("bench.backends.ray.client.connect", lambda place: reached.append(place) or _no_client())
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    job = {"backend": "ray", "jobs": [{"id": f"x@{address}"}], "address": address}
    (run / "job.json").write_text(json.dumps(job))
    for verb in ("runs", "why", "watch", "logs", "cancel"):
        with pytest.raises(SystemExit):
            main([verb, *map(str, VERBS[verb](run))])
    assert (requests, reached) == ([], [])
    assert "this folder is a copy of another run folder" in capsys.readouterr().err
    (run / "job.json").write_text(json.dumps(job | {"inode": run.stat().st_ino}))
    with pytest.raises(SystemExit):
        main(["runs", str(run.parent)])
    assert reached == [address], "a run that was started in this folder"
    server.shutdown()
    server.server_close()


def _no_client() -> object:
    raise SubmitError("no client", where="here", fix="none")


@pytest.mark.starts
def test_cancel_signals_only_the_process_that_has_the_lock(template: Path, tmp_path: Path) -> None:
    run = shutil.copytree(template, tmp_path / "run")
    (run / "job.json").unlink()
    victim = subprocess.Popen(["sleep", "60"])
    try:
        HOSTILE["a lock that names init"](run)
        (run / ".run.lock").write_text(f"{socket.gethostname()} {victim.pid}\n")
        with pytest.raises(SubmitError, match="does not hold the lock of the run"):
            resume.cancel(run)
        time.sleep(0.1)
        assert victim.poll() is None
    finally:
        release()
        victim.kill()
        victim.wait()
    drives = "import sys, time\nfrom pathlib import Path\nfrom bench.backends import run_lock\n"
    drives += "with run_lock.driving(Path(sys.argv[1])):\n print(flush=True)\n time.sleep(60)\n"
    words = [sys.executable, "-c", drives, str(run)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        driver.stdout.readline()
        resume.cancel(run)
        assert driver.wait(timeout=30) == -signal.SIGTERM


def test_files_that_others_could_have_changed_are_not_run(template: Path, tmp_path: Path, calls: Calls) -> None:
    """Whatever the umask was: a script that another user edited runs as this user."""
    for number, name in enumerate(("job.sbatch", "job.json", "plan.json", "ledger.json", "rank_logs")):
        run = shutil.copytree(template, tmp_path / str(number))
        (run / name).chmod(0o777)
        for verb in (resume.resume, resume.cancel):
            with pytest.raises(ConfigError, match=f"CFG-11: other users can write to this file.*\n.*/{name}\n"):
                verb(run)
    assert calls.names() == set()


@pytest.mark.parametrize(
    "how",
    ["the folder of another user", "a script that all can write to", "a lock that names init", "rank_logs is a link"],
)
def test_rm_deletes_no_folder_that_is_not_ours_alone(
    how: str, template: Path, tmp_path: Path, calls: Calls, deeds: list[str], in_time: None
) -> None:
    """Also not after the questions are answered; and `tag` writes nothing into it."""
    run = shutil.copytree(template, tmp_path / "runs" / "run")
    HOSTILE[how](run)
    if how == "rank_logs is a link":
        shutil.rmtree(run / "rank_logs")
        (run / "rank_logs").symlink_to("/etc")
    before = contents(run)
    for words in (["rm", run, "--yes"], ["gc", run.parent, "--older-than", "0.000001", "--yes"], ["tag", run, "x"]):
        if how in UNOWNED and os.geteuid() != 0 or (how == "a lock that names init" and words[0] == "tag"):
            continue
        with pytest.raises(SystemExit):
            main(list(map(str, words)))
    assert contents(run) == before and deeds == []


def test_errors_print_no_escapes() -> None:
    error = BenchError(f"no {ESCAPES}", where=f"/a/{ESCAPES}", fix="x")
    assert all(letter.isprintable() or letter == "\n" for letter in f"{error}{error.what}{error.where}")


def test_a_file_is_opened_without_waiting_and_only_if_it_is_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        for follows in (False, True):
            with pytest.raises(OSError, match="not a regular file|symbolic link"):
                regular_files.opened(tmp_path / name, follows_links=follows)
    with pytest.raises(OSError, match="3 bytes, but runstop reads at most 2 bytes"):
        (tmp_path / "file").write_text("abc")
        regular_files.read_bytes(tmp_path / "file", max_bytes=2)
    assert folders.other_writers(tmp_path) == ""
