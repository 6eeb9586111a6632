"""Starting, waiting for, watching and stopping a server, without running its program."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import URLError

import psutil
import pytest

from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import Device
from bench.contract.serving import Serving
from bench.errors import SubmitError
from helpers import serving, stub_server
from jobs.serving import server

ARGV = "task.serving.server.argv=['{python}','-m','one','{port}','{model}']"
PORT = "task.serving.server.port=20001"


class Program:
    """A fake process of a server."""

    def __init__(self, *, code: int | None = None, is_deaf: bool = False) -> None:
        self.pid, self.code, self.is_deaf = 77, code, is_deaf
        self.argv, self.options = list[str](), dict[str, Any]()
        self.calls = list[str]()

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")
        self.code = -9

    def wait(self, timeout: float | None = None) -> None:
        self.calls.append(f"wait {timeout}")
        if timeout is None:
            return
        if self.is_deaf:
            raise subprocess.TimeoutExpired("server", timeout)
        self.code = 0


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    """Replaces the next program that is started."""
    created = Program()

    def popen(argv: list[str], **options: Any) -> Program:
        created.argv, created.options = argv, options
        return created

    monkeypatch.setattr(server.subprocess, "Popen", popen)
    return created


class Clock:
    """A fake clock that advances only in sleep, by 0.25 s."""

    now_s = 128.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    created = Clock()
    monkeypatch.setattr(server, "time", created)
    monkeypatch.setattr(server, "POLL_S", 0.25)
    return created


Answer = int | Exception
Requests = list[tuple[str, float]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Requests]]:
    """Set the successive answers of the health check, the last one repeating; return the requests."""

    def answer_with(*given: Answer) -> Requests:
        requests = Requests()

        def opened(url: str, *, timeout: float) -> Any:
            requests.append((url, timeout))
            answer = given[min(len(requests), len(given)) - 1]
            if isinstance(answer, Exception):
                raise answer
            return nullcontext(SimpleNamespace(status=answer))

        monkeypatch.setattr(server, "DIRECTLY", SimpleNamespace(open=opened))
        return requests

    yield answer_with


def started(folder: Path, *words: str, plan: ServingPlan | None = None) -> server.RunningServer:
    plan = plan or serving.planned(ARGV, PORT, *words)
    return server.start(plan, block(plan), folder / "model", folder / "server.out")


def block(plan: ServingPlan) -> Serving:
    assert plan.config.task.serving is not None
    return plan.config.task.serving


def test_command_environment_and_output_file_of_a_server(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    program: Program,
    clock: Clock,
    answers: Callable[..., Requests],
) -> None:
    """It is healthy once it returns 200; it receives signals that the rank's guard blocks."""
    requests = answers(URLError("refused"), 204, 200)
    monkeypatch.setenv("KEPT", "from the rank")
    actual = started(tmp_path, "+task.serving.server.environment.GIVEN=yes")
    argv, options = program.argv, program.options
    assert argv == actual.argv and argv[:5] == [sys.executable, "-m", "one", "20001", str(tmp_path / "model")]
    assert (options["env"]["GIVEN"], options["env"]["KEPT"]) == ("yes", "from the rank")
    assert options["stdout"].name == str(tmp_path / "server.out") and options["cwd"] == tmp_path
    assert (options["stdin"], options["stderr"]) == (subprocess.DEVNULL, subprocess.STDOUT)
    assert (actual.url, actual.model) == ("http://127.0.0.1:20001", str(tmp_path / "model"))
    assert requests == [("http://127.0.0.1:20001/health", 5.0)] * 3 and actual.healthy_s == 0.5
    bound = list[int]()
    monkeypatch.setattr(server, "end_with", bound.append)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    options["preexec_fn"]()
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == set() and bound == [os.getpid()]


def test_the_command_is_filled_in_from_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: Program, answers: Callable[..., Requests]
) -> None:
    """The program is found on PATH; without a port a free one is used."""
    answers(200)
    words = ("task.serving.server.argv=[one,'{host}','{tp}','{device}','{total}','{requests}','{model}','{port}']",)
    plan = serving.planned(*words, "task.serving.server.cpu_options=[--less]", "task.serving.server.options=['{tp}']")
    (tmp_path / "one").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(server, "PORTS", range(20100, 20200))
    actual = started(tmp_path, plan=plan)
    *argv, port = actual.argv[:8]
    assert argv == [str(tmp_path / "one"), "127.0.0.1", "1", "cpu", "40", "200", str(tmp_path / "model")]
    assert int(port) in range(20100, 20200) and actual.url.endswith(f":{port}")
    assert actual.argv[8:] == ["--dtype", "float32", "--less", "1"]
    config = plan.config
    on_gpus = replace(
        config, cluster=replace(config.cluster, device=Device.cuda), parallel=replace(config.parallel, tp=4)
    )
    actual = started(tmp_path, plan=replace(plan, config=on_gpus))
    assert actual.argv[2:4] == ["4", "cuda"] and actual.argv[8:] == ["--dtype", "float32", "4"]


def test_a_missing_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def popen(argv: list[str], **_: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", argv[0])

    monkeypatch.setattr(server.subprocess, "Popen", popen)
    with pytest.raises(
        SubmitError, match=f"the server could not be started: {sys.executable}: No such file"
    ) as refused:
        started(tmp_path)
    assert (refused.value.where, refused.value.rule) == ("task.serving.server.argv", "SRV-01")


def test_a_server_that_ends_or_is_not_healthy_in_time_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: Program, clock: Clock, answers: Callable[..., Requests]
) -> None:
    monkeypatch.setattr(server.psutil, "Process", lambda pid: SimpleNamespace(children=lambda recursive: []))
    output = tmp_path / "server.out"
    output.write_text("loading\nno such model\n")
    requests = answers(503)
    with pytest.raises(
        SubmitError, match=r"did not become healthy within 2\.5 s: HTTP 503; last line of its output: no such m"
    ) as late:
        started(tmp_path, "task.serving.server.startup_timeout_s=2.5")
    assert (late.value.rule, late.value.fix) == (
        "SRV-02",
        "read the output of the server, or raise task.serving.server.startup_timeout_s",
    )
    assert late.value.where == f"http://127.0.0.1:20001/health, {output}"
    assert len(requests) == 10 and program.calls == ["terminate", "wait 20.0"]
    for code, how in ((3, "with exit code 3"), (0, "with exit code 0"), (-9, "by signal 9")):
        program.code = code
        with pytest.raises(SubmitError, match=f"the server ended before it was healthy, {how}; last line") as ended:
            started(tmp_path)
        assert (ended.value.rule, ended.value.where) == ("SRV-01", str(output))
    assert len(requests) == 10, "a server that has ended is not queried"


def test_a_server_elsewhere_has_no_process_and_a_short_limit(
    tmp_path: Path, clock: Clock, answers: Callable[..., Requests]
) -> None:
    plan = serving.planned(*serving.elsewhere("http://node7:8000/", tmp_path))
    requests = answers(OSError("refused"), 200)
    actual = server.start(plan, block(plan), None, tmp_path / "server.out")
    assert actual == server.RunningServer("http://node7:8000", "tiny", [], 0.0, None)
    assert requests == [("http://node7:8000/health", 5.0)] * 2 and not (tmp_path / "server.out").exists()
    requests, began_s = answers(URLError("refused"), ValueError("no answer")), clock.now_s
    with pytest.raises(SubmitError, match="did not become healthy within 30 s: no answer\n") as late:
        server.start(plan, block(plan), None, tmp_path / "server.out")
    assert late.value.fix == "start the server, or correct task.serving.server.url" and clock.now_s - began_s == 30
    assert late.value.where == "http://node7:8000/health" and len(requests) == 120
    plan = serving.planned(*serving.elsewhere("http://node7:8000", tmp_path), "task.serving.server.startup_timeout_s=1")
    with pytest.raises(SubmitError, match="did not become healthy within 1 s: "):
        server.start(plan, block(plan), None, tmp_path / "server.out")


def test_stopping_a_server_kills_its_children_and_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: Program
) -> None:
    child = server.Child(["one"], {}, tmp_path / "server.out")
    killed = list[str]()

    def gone() -> None:
        raise psutil.NoSuchProcess(1)

    def tree(pid: int) -> SimpleNamespace:
        assert pid == 77
        left = [SimpleNamespace(kill=gone), SimpleNamespace(kill=lambda: killed.append("worker"))]
        return SimpleNamespace(children=lambda *, recursive: left if recursive else [])

    monkeypatch.setattr(server.psutil, "Process", tree)
    assert (child.is_stopping, child.exit_code()) == (False, None)
    child.stop()
    assert (child.is_stopping, child.exit_code(), program.calls) == (True, 0, ["terminate", "wait 20.0"])
    program.code, program.is_deaf = None, True
    child.stop()
    assert program.calls[2:] == ["terminate", "wait 20.0", "kill", "wait None"] and killed == ["worker"] * 2
    monkeypatch.setattr(server.psutil, "Process", lambda pid: gone())
    child.stop()
    assert len(program.calls) == 6, "it has ended before"


@pytest.mark.parametrize(
    ("printed", "words"),
    [("", "(no output)"), ("\n \n", "(no output)"), ("first\nlast\n\n", "last"), ("x" * 500, "x" * 400)],
)
def test_the_last_line_of_a_server(tmp_path: Path, program: Program, printed: str, words: str) -> None:
    output = tmp_path / "server.out"
    child = server.Child(["one"], {}, output)
    assert child.last_line() == "(no output)"
    output.write_text(printed)
    assert child.last_line() == words
    output.unlink()
    assert child.last_line() == "(the output could not be read)"


def test_a_port_is_free_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: Program) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(server, "PORTS", range(port, port + 1))
        with pytest.raises(SubmitError, match=f"no port from {port} to {port} is free") as none_left:
            server.free_port()
        with pytest.raises(SubmitError, match=f"port {port} is already in use") as refused:
            started(tmp_path, f"task.serving.server.port={port}")
    assert (none_left.value.rule, none_left.value.where) == ("SRV-01", "127.0.0.1")
    assert none_left.value.fix == "set task.serving.server.port to a free port"
    assert (refused.value.rule, refused.value.where) == ("SRV-01", "task.serving.server.port")
    assert server.free_port() == port and program.argv == []


def test_a_real_answer_of_its_health_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "POLL_S", 0.01)
    busy = pytest.raises(SubmitError, match="within 0.1 s: Busy\n")
    for fault, within_s, ends in (("none", 60, nullcontext()), ("never", 0.1, busy)):
        with stub_server.in_a_thread(fault) as url, ends:
            words = (*serving.elsewhere(url, tmp_path), f"task.serving.server.startup_timeout_s={within_s}")
            plan = serving.planned(*words)
            assert server.start(plan, block(plan), None, tmp_path / "server.out").url == url
