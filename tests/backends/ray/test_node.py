"""A node's actor and the supervisor of its command, with fake processes."""

import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from bench.backends.ray import placement_group, supervisor
from bench.backends.ray.placement_group import Ended, Node, Place
from bench.contract.schema import PORTS

PARENT = 40


@dataclass
class Printing:
    """A process that prints one part per poll and then ends."""

    parts: list[bytes]
    code: int
    argv: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)

    def start(self, argv: list[str], *, stdout: BinaryIO, **options: Any) -> "Printing":
        self.argv, self.options, self._output = argv, options, stdout
        return self

    def poll(self) -> int | None:
        if not self.parts:
            return self.code
        if part := self.parts.pop(0):
            self._output.write(part)
        return None if self.parts else self.code

    def wait(self) -> int:
        assert not self.parts
        return self.code

    def send_signal(self, signum: int) -> None:
        self.signals.append(signum)


def test_a_node_runs_a_command_under_a_supervisor_and_keeps_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [f"{number}\n" for number in range(22)]
    process = Printing(["".join(lines[:3]).encode(), b"", "".join(lines[3:]).encode() + b"the end \xff"], -3)
    slept = list[float]()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(placement_group.subprocess, "Popen", process.start)
    monkeypatch.setattr(placement_group, "time", SimpleNamespace(sleep=slept.append))
    for name, value in {"PYTHONPATH": "/a:b::/c:/a", "RAY_JOB_ID": "1", "RAY_KEPT": "2", "HOST": "h"}.items():
        monkeypatch.setenv(name, value)
    actor = Node(["RAY_KEPT"])
    actor.stop()  # there is nothing to stop yet
    assert actor.run(["-m", "bench.driver"], {"HOST": "rig", "PLAN": "p"}) == Ended(
        -3, (*map(str, range(3, 22)), "the end \ufffd")
    )
    assert capsys.readouterr().out == "".join(lines) + "the end \ufffd" and slept == [placement_group.OUTPUT_POLL_S] * 2
    assert process.argv == [sys.executable, "-m", "bench.backends.ray.supervisor", sys.executable, "-m", "bench.driver"]
    environment = process.options.pop("env")
    assert environment["PYTHONPATH"] == f"{Path(placement_group.__file__).parents[3]}:/a:/c"
    assert (environment["HOST"], environment["PLAN"], environment["RAY_KEPT"]) == ("rig", "p", "2")
    assert "RAY_JOB_ID" not in environment
    assert process.options == {
        "stdin": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "start_new_session": True,
    }
    actor.stop()
    assert process.signals == [], "it has ended"
    process.parts = [b"", b""]
    actor.stop()
    assert process.signals == [signal.SIGTERM]


def test_an_actor_reports_its_node_existing_paths_and_a_free_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    context = SimpleNamespace(get_node_id=lambda: 77)
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))
    monkeypatch.setattr(socket, "gethostname", lambda: "rig7")
    actor = Node([])
    assert actor.where() == Place("rig7", "10.0.0.7", "77")
    assert actor.exists(str(tmp_path)) and not actor.exists(str(tmp_path / "a"))
    assert (PORTS.start, PORTS.stop) == (61000, 65536)
    with socket.socket() as taken, socket.socket() as other:
        for one in (taken, other):
            one.bind(("", 0))
            one.listen()
        free = actor.free_port()
        assert free in PORTS
        order = [taken.getsockname()[1], other.getsockname()[1], free]
        monkeypatch.setattr(random, "sample", lambda ports, count: order[: count if ports is PORTS else 0])
        assert actor.free_port() == free
        order.pop()
        with pytest.raises(OSError, match="no port from 61000 to 65535 is free"):
            actor.free_port()


@dataclass
class Kept:
    """A command that runs for `looks` polls; it ends on SIGTERM, or only on SIGKILL."""

    looks: int
    code: int
    obeys: bool = True
    argv: list[str] = field(default_factory=list)
    done: list[object] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def start(self, argv: list[str], **options: Any) -> "Kept":
        self.argv, self.options = argv, options
        return self

    def poll(self) -> int | None:
        self.looks -= 1
        return self.code if self.looks < 0 else None

    @property
    def returncode(self) -> int:
        return self.code

    def terminate(self) -> None:
        self.done.append("terminate")

    def kill(self) -> None:
        self.done.append("kill")
        self.obeys = True

    def wait(self, timeout: float | None = None) -> int:
        self.done.append(timeout)
        if not self.obeys:
            raise subprocess.TimeoutExpired("command", timeout or 0)
        return self.code


@dataclass
class Supervisor:
    """The supervisor's environment: its successive parents and its standard input."""

    parents: list[int]
    input: list[bytes]
    done: list[object]
    handlers: dict[int, Callable[..., object]] = field(default_factory=dict)

    def select(self, reading: list[int], writing: list[int], odd: list[int], timeout: float) -> Any:
        assert (reading, writing, odd, timeout) == ([0], [], [], supervisor.POLL_S)
        return ([0] if self.input else [], [], [])

    def read(self, file: int, count: int) -> bytes:
        assert (file, count) == (0, 1)
        return self.input.pop(0)


Keep = Callable[..., tuple[int, Supervisor]]


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Run the supervisor of a command; return its exit code."""

    def run(command: Kept, *input: bytes) -> tuple[int, Supervisor]:
        fake = Supervisor([PARENT], list(input), command.done)
        libc = SimpleNamespace(prctl=lambda *words: fake.done.append(words))
        calls = {"getpid": lambda: PARENT, "getppid": lambda: fake.parents.pop(0), "read": fake.read}
        system = SimpleNamespace(**calls, _exit=lambda code: fake.done.append(code))
        monkeypatch.setattr(supervisor, "os", system)
        monkeypatch.setattr(supervisor, "ctypes", SimpleNamespace(CDLL=lambda name, use_errno: libc))
        monkeypatch.setattr(supervisor, "select", SimpleNamespace(select=fake.select))
        monkeypatch.setattr(subprocess, "Popen", command.start)
        monkeypatch.setattr(signal, "signal", fake.handlers.__setitem__)
        monkeypatch.setattr(sys, "argv", ["supervisor", "a", "b"])
        with pytest.raises(SystemExit) as ended:
            supervisor.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code, fake

    return run


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (3, 3), (-signal.SIGKILL, 137)])
def test_a_supervisor_ends_as_its_command_does(code: int, exit_code: int, keep: Keep) -> None:
    command = Kept(3, code)
    assert keep(command, b"x")[0] == exit_code
    assert command.argv == ["a", "b"] and command.done == [], "the content of its input does not matter"


def test_a_command_ends_with_its_supervisor_even_if_that_ended_before_prctl(keep: Keep) -> None:
    command = Kept(0, 0)
    _, fake = keep(command)
    before = command.options.pop("preexec_fn")
    assert command.options == {"stdin": subprocess.DEVNULL, "start_new_session": True}
    before()
    assert command.done == [(1, signal.SIGTERM)]
    fake.parents = [1]
    before()
    assert command.done[1:] == [(1, signal.SIGTERM), 143]


def test_a_supervisor_forwards_signals(keep: Keep) -> None:
    command = Kept(0, 0)
    _, fake = keep(command)
    assert fake.handlers.keys() == {signal.SIGTERM, signal.SIGINT}
    fake.handlers[signal.SIGINT](signal.SIGINT, None)
    assert command.done == ["terminate"]


def test_a_command_without_an_actor_has_ninety_seconds_to_end(keep: Keep) -> None:
    willing, stuck = Kept(9, 3), Kept(9, -signal.SIGKILL, obeys=False)
    assert keep(willing, b"x", b"")[0] == 3 and willing.done == ["terminate", 90.0]
    assert keep(stuck, b"")[0] == 137 and stuck.done == ["terminate", 90.0, "kill", None]
