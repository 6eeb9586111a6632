"""A Ray cluster on this machine, as the fixture `cluster` yields it: a head that works too, and a second node."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
CPUS = 2
WORKERS = 100
"""Ports of a node's workers; each node has its own."""
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # a token that this user has would be required otherwise
    "RAY_DEDUP_LOGS": "0",
    "RAY_enable_worker_prestart": "0",  # a worker costs a second of CPU time, and these jobs need four
    "RAY_prestart_worker_first_driver": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}


@dataclass
class Cluster:
    """The cluster's processes: one `ray start --block` per node."""

    folder: Path
    port: int
    as_user: tuple[str, ...] = ()
    """The command in front of `ray start` that switches to another user."""
    nodes: "dict[str, subprocess.Popen[bytes]]" = field(default_factory=dict)
    num_started: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"

    def start_head(self) -> None:
        words = ["--head", f"--port={self.port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={self.port + 1}"]
        words += [f"--ray-client-server-port={self.port + 2}", f"--temp-dir={self.folder}"]
        self._start("head", words)
        self._until(lambda: bool(self._answers("/api/version")))

    def start_node(self, name: str = "second") -> None:
        """Start a node, and wait until the cluster has it, and knows of those that are gone."""
        self._start(name, [f"--address=127.0.0.1:{self.port}"])
        self._until(lambda: self.num_alive() == len(self.nodes))

    def _until(self, happens: Callable[[], bool]) -> None:
        """Wait for something that ends well only if all nodes start."""
        until(lambda: happens() or any(node.poll() is not None for node in self.nodes.values()), 120, self.logs)
        assert all(node.poll() is None for node in self.nodes.values()), self.logs()

    def kill_node(self, name: str) -> None:
        """Cut a node's power: every process on it dies at once, what runners have started as well."""
        process = self.nodes.pop(name)
        for pid in [*_descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def num_alive(self) -> int:
        page = self._answers("/api/v0/nodes?detail=1")
        return sum(node["state"] == "ALIVE" for node in page["data"]["result"]["result"]) if page else 0

    def _start(self, name: str, words: Sequence[str]) -> None:
        number, self.num_started = self.num_started, self.num_started + 1
        first = self.port + 100 + WORKERS * number
        argv = [*self.as_user, BIN / "ray", "start", "--block", f"--num-cpus={CPUS}"]
        argv += ["--object-store-memory=80000000", *words]
        argv += [f"--min-worker-port={first}", f"--max-worker-port={first + WORKERS - 1}", "--disable-usage-stats"]
        argv += [f"--dashboard-agent-listen-port={self.port + 10 + number}"]
        env = os.environ | QUIET | {"PATH": f"{BIN}:{os.environ['PATH']}"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.nodes[name] = subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True)

    def _answers(self, page: str) -> Any:
        with suppress(OSError, ValueError), urllib.request.urlopen(self.address + page, timeout=5) as answer:
            return json.load(answer)
        return None

    def logs(self) -> str:
        """Return the logs of the nodes, for the message of a failed test."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


@contextmanager
def running(*, as_user: tuple[str, ...] = ()) -> Iterator[Cluster]:
    """Boot a cluster in a folder of its own, for as long as the block takes."""
    folder = Path(tempfile.mkdtemp(prefix="bench-ray-", dir="/tmp"))  # not tmp_path: Unix sockets need it short
    folder.chmod(0o777 if as_user else 0o700)
    booted = Cluster(folder, free_ports(100 + 20 * WORKERS), as_user)
    try:
        booted.start_head()
        booted.start_node()
        yield booted
    finally:
        for name in list(booted.nodes):
            booted.kill_node(name)
        shutil.rmtree(folder, ignore_errors=True)


def until(happens: Callable[[], Any], timeout_s: float, what: Callable[[], str] = str) -> None:
    """Wait for a condition; `what` returns the message for a timeout."""
    deadline = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < deadline, f"not within {timeout_s} s\n{what()}"
        time.sleep(0.2)


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have, however far they have moved away."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    descendants = list(children.get(pid, []))
    for child in descendants:
        descendants += children.get(child, [])
    return descendants


def free_ports(count: int) -> int:
    """Return the first of `count` adjacent ports of which the first hundred are free."""
    while True:
        first = random.randrange(18000, 32000 - count)
        try:
            for port in range(first, first + 100):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
