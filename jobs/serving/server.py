"""A server as a child of rank 0: started, awaited until it is healthy, watched while it is loaded, and stopped."""

import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import psutil

from bench.contract.plan_kinds import ServingPlan
from bench.contract.schema import PORTS, Device
from bench.contract.serving import Server, Serving, command, total_tokens
from bench.errors import SubmitError
from jobs.ranks.gpu_sampler import end_with

HOST = "127.0.0.1"
POLL_S, ANSWER_S, STOP_S = 0.2, 5.0, 20.0
ELSEWHERE_S = 30.0
"""How long a server that runs elsewhere is waited for: it was started before."""
TAIL_BYTES = 400
SPARE_FILES = 512
WHERE = "task.serving.server"
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""No proxy of the site stands between us and the server."""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that answers."""

    url: str
    model: str
    """What requests call the model."""
    argv: list[str]
    """Empty for a server that runs elsewhere."""
    healthy_s: float
    child: "Child | None"


class Child:
    """The process of a server, with its output in a file."""

    def __init__(self, argv: list[str], environment: dict[str, str], output: Path) -> None:
        self.output = output
        parent = os.getpid()
        with output.open("ab") as file:
            try:
                self._process = subprocess.Popen(
                    argv,
                    cwd=output.parent,
                    env=os.environ | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    preexec_fn=lambda: _begin(parent),  # in the group of this rank, and gone when it is
                )
            except OSError as error:
                raise SubmitError(
                    f"the server cannot be started: {argv[0]}: {error.strerror}",
                    where=f"{WHERE}.argv",
                    fix="install it where the ranks run, or name its path",
                    rule="SRV-01",
                ) from error
        self._end = threading.Event()
        self.is_stopping = False

    def exit_code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """End the server with all that it has started; its own processes first get a moment to end by themselves."""
        self.is_stopping = True
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._process.pid).children(recursive=True)
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=STOP_S)
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def last_words(self) -> str:
        """Return the last line that the server printed."""
        with suppress(OSError):
            lines = self.output.read_bytes()[-8192:].decode(errors="replace").strip().splitlines()
            return lines[-1][:TAIL_BYTES] if lines else "it printed nothing"
        return "its output cannot be read"


def _begin(parent: int) -> None:
    """Let signals through, which the guard of this rank has blocked, and have the server end with the rank."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with(parent)


def started(plan: ServingPlan, serving: Serving, model: Path | None, output: Path) -> Started:
    """Return the server once it is healthy.

    Raises:
        SubmitError: it cannot be started, has ended, or is not healthy in time.
    """
    server, began_s = serving.server, time.monotonic()
    if server.url is not None:
        found = Started(server.url.rstrip("/"), server.model or "", [], 0.0, None)
        _await(found, server, began_s)
        return found
    assert model is not None
    port = server.port or free_port()
    _require_free(port)
    argv = _argv(plan, serving, model, port)
    found = Started(f"http://{HOST}:{port}", str(model), argv, 0.0, Child(argv, server.environment, output))
    try:
        _await(found, server, began_s)
    except BaseException:
        assert found.child is not None
        found.child.stop()
        raise
    return Started(found.url, found.model, argv, time.monotonic() - began_s, found.child)


def allow_connections(count: int) -> None:
    """Let this process and its server have so many connections at a time, and the files that they open besides.

    Raises:
        SubmitError: the site does not allow it.
    """
    needed, (soft, hard) = count + SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise SubmitError(
                f"{count:,} requests at a time need {needed:,} open files, and {hard:,} are allowed",
                where="ulimit -n",
                fix="have the limit raised, or lower task.serving.requests",
                rule="RUN-15",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def free_port() -> int:
    """Return a port that nobody listens at; of PORTS, or a client's connection may have it before the server is up."""
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    what = f"no port from {PORTS.start} to {PORTS.stop - 1} is free"
    raise SubmitError(what, where=HOST, fix=f"set {WHERE}.port", rule="SRV-01")


def _require_free(port: int) -> None:
    """Raise SubmitError where somebody listens: its answers would be taken for those of our server."""
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex((HOST, port)) == 0:
            raise SubmitError(
                f"somebody listens at port {port} already",
                where=f"{WHERE}.port",
                fix="choose another, or null to have a free one picked",
                rule="SRV-01",
            )


def _argv(plan: ServingPlan, serving: Serving, model: Path, port: int) -> list[str]:
    config, server = plan.config, serving.server
    words = {
        "python": sys.executable,
        "model": str(model),
        "host": HOST,
        "port": str(port),
        "tp": str(config.parallel.tp or 1),
        "device": "cuda" if config.cluster.device is Device.cuda else "cpu",
        "total": str(total_tokens(serving)),
        "requests": str(serving.requests),
    }
    asked = command(server, precision=config.precision.name, is_cpu=config.cluster.device is Device.cpu)
    argv = [word.format(**words) for word in asked]
    return [shutil.which(argv[0]) or argv[0], *argv[1:]]


def _await(found: Started, server: Server, began_s: float) -> None:
    """Wait until the server answers 200."""
    url, said = found.url + server.health, "nothing listens there"
    within_s = server.healthy_within_s if found.child else min(server.healthy_within_s, ELSEWHERE_S)
    while time.monotonic() - began_s < within_s:
        if found.child is not None and found.child.exit_code() is not None:
            raise ended(found.child, "before it was healthy", "SRV-01")
        try:
            with DIRECTLY.open(url, timeout=ANSWER_S) as answer:
                if answer.status == 200:
                    return
                said = f"HTTP {answer.status}"
        except (URLError, OSError, ValueError) as error:
            said = str(getattr(error, "reason", error))
        time.sleep(POLL_S)
    words = f"; it last printed: {found.child.last_words()}" if found.child else ""
    fix = f"read its output, or raise {WHERE}.healthy_within_s" if found.child else f"start it, or correct {WHERE}.url"
    raise SubmitError(
        f"the server was not healthy within {within_s:g} s: {said}{words}",
        where=f"{url}" + (f", {found.child.output}" if found.child else ""),
        fix=fix,
        rule="SRV-02",
    )


def ended(child: Child, when: str, rule: str) -> SubmitError:
    """Return the error of a server that has ended by itself."""
    code = child.exit_code()
    how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    return SubmitError(
        f"the server ended {when}, {how}; it last printed: {child.last_words()}",
        where=str(child.output),
        fix="read the output of the server",
        rule=rule,
    )
