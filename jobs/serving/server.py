"""Run a server as a child process of rank 0: start it, wait until it is healthy, watch it under load, stop it."""

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
from bench.contract.serving import Server, ServerProfile, Serving, command, total_tokens
from bench.errors import SubmitError
from jobs.ranks.gpu_sampler import end_with
from jobs.serving.recorder import sitecustomize as recorder

HOST = "127.0.0.1"
POLL_S, ANSWER_S, STOP_S = 0.2, 5.0, 20.0
ELSEWHERE_S = 30.0
"""Longest wait for a server that runs elsewhere and should be up already."""
TAIL_BYTES = 400
SPARE_FILES = 512
WHERE = "task.serving.server"
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Ignores the site's HTTP proxy."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A healthy server."""

    url: str
    model: str
    """The name of the model in requests."""
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
                    preexec_fn=lambda: _begin(parent),  # in the process group of this rank, and ended with it
                )
            except OSError as error:
                raise SubmitError(
                    f"the server could not be started: {argv[0]}: {error.strerror}",
                    where=f"{WHERE}.argv",
                    fix=f"install {argv[0]} on the nodes, or write the full path of {argv[0]} in argv",
                    rule="SRV-01",
                ) from error
        self._end = threading.Event()
        self.is_stopping = False

    def exit_code(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """Stop the server and all its child processes: SIGTERM first, SIGKILL after STOP_S."""
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

    def last_line(self) -> str:
        """Return the last line of the server's output."""
        with suppress(OSError):
            lines = self.output.read_bytes()[-8192:].decode(errors="replace").strip().splitlines()
            return lines[-1][:TAIL_BYTES] if lines else "(no output)"
        return "(the output could not be read)"


def _begin(parent: int) -> None:
    """Unblock the signals that this rank's guard has blocked, and let the kernel end the server with the rank."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with(parent)


def start(
    plan: ServingPlan, serving: Serving, model: Path | None, output: Path, *, traces: Path | None = None
) -> RunningServer:
    """Start the server and return it once it is healthy; `traces` is the folder of its profile, if it gets one.

    Raises:
        SubmitError: it could not be started, ended, or was not healthy in time.
    """
    server, began_s = serving.server, time.monotonic()
    if server.url is not None:
        running = RunningServer(server.url.rstrip("/"), server.model or "", [], 0.0, None)
        _await(running, server, began_s)
        return running
    assert model is not None
    port = server.port or free_port()
    _require_free(port)
    argv, environment = _argv(plan, serving, model, port, traces), dict(server.environment)
    if traces is not None and server.profile is not None:
        environment |= _profile_environment(server.profile, traces, plan.config.cluster.device, environment)
    running = RunningServer(f"http://{HOST}:{port}", str(model), argv, 0.0, Child(argv, environment, output))
    try:
        _await(running, server, began_s)
    except BaseException:
        assert running.child is not None
        running.child.stop()
        raise
    return RunningServer(running.url, running.model, argv, time.monotonic() - began_s, running.child)


def _profile_environment(
    profile: ServerProfile, traces: Path, device: Device, environment: dict[str, str]
) -> dict[str, str]:
    """Return the environment variables that let a server write its profile into a folder."""
    own = {name: value.format(profile=traces) for name, value in profile.environment.items()}
    if profile.has_endpoints:
        return own
    path = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    path = ":".join([str(Path(recorder.__file__).parent), *([path] if path else [])])
    return own | {"PYTHONPATH": path, recorder.FOLDER: str(traces), recorder.DEVICE: device.name}


def allow_connections(count: int) -> None:
    """Raise the limit of open files of this process and its server for this many connections.

    Raises:
        SubmitError: the hard limit is too low.
    """
    needed, (soft, hard) = count + SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise SubmitError(
                f"{count:,} parallel requests need {needed:,} open files, but the limit is {hard:,}",
                where="ulimit -n",
                fix="raise the hard limit of open files, or lower task.serving.requests",
                rule="RUN-15",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def free_port() -> int:
    """Return a free port of PORTS, which are outside the range of ephemeral client ports."""
    for port in random.sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port
    what = f"no port from {PORTS.start} to {PORTS.stop - 1} is free"
    raise SubmitError(what, where=HOST, fix=f"set {WHERE}.port to a free port", rule="SRV-01")


def _require_free(port: int) -> None:
    """Raise SubmitError if the port is in use: another server would answer in place of ours."""
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex((HOST, port)) == 0:
            raise SubmitError(
                f"port {port} is already in use",
                where=f"{WHERE}.port",
                fix=f"set {WHERE}.port to another port, or to null for any free port",
                rule="SRV-01",
            )


def _argv(plan: ServingPlan, serving: Serving, model: Path, port: int, traces: Path | None) -> list[str]:
    config, server = plan.config, serving.server
    values = {
        "python": sys.executable,
        "model": str(model),
        "host": HOST,
        "port": str(port),
        "tp": str(config.parallel.tp or 1),
        "device": "cuda" if config.cluster.device is Device.cuda else "cpu",
        "total": str(total_tokens(serving, plan.lengths)),
        "requests": str(serving.requests),
        "memory_fraction": f"{server.memory_fraction:g}",
        "profile": str(traces),
    }
    is_cpu = config.cluster.device is Device.cpu
    template = command(server, precision=config.precision.name, is_cpu=is_cpu, is_profiled=traces is not None)
    argv = [part.format(**values) for part in template]
    return [shutil.which(argv[0]) or argv[0], *argv[1:]]


def _await(running: RunningServer, server: Server, began_s: float) -> None:
    """Wait until the health check returns HTTP 200."""
    url, last_answer = running.url + server.health, "no answer"
    within_s = server.startup_timeout_s if running.child else min(server.startup_timeout_s, ELSEWHERE_S)
    while time.monotonic() - began_s < within_s:
        if running.child is not None and running.child.exit_code() is not None:
            raise ended(running.child, "before it was healthy", "SRV-01")
        try:
            with DIRECTLY.open(url, timeout=ANSWER_S) as answer:
                if answer.status == 200:
                    return
                last_answer = f"HTTP {answer.status}"
        except (URLError, OSError, ValueError) as error:
            last_answer = str(getattr(error, "reason", error))
        time.sleep(POLL_S)
    last_line = f"; last line of its output: {running.child.last_line()}" if running.child else ""
    fix = (
        f"read the output of the server, or raise {WHERE}.startup_timeout_s"
        if running.child
        else f"start the server, or correct {WHERE}.url"
    )
    raise SubmitError(
        f"the server did not become healthy within {within_s:g} s: {last_answer}{last_line}",
        where=f"{url}" + (f", {running.child.output}" if running.child else ""),
        fix=fix,
        rule="SRV-02",
    )


def ended(child: Child, when: str, rule: str) -> SubmitError:
    """Return the error of a server that ended unexpectedly."""
    code = child.exit_code()
    how = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    return SubmitError(
        f"the server ended {when}, {how}; last line of its output: {child.last_line()}",
        where=str(child.output),
        fix="read the output of the server to see why it ended",
        rule=rule,
    )
