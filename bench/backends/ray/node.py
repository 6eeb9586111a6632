"""One node of a run, as an actor: it says where it is, and runs the runner until that ends or is told to."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bench.contract.schema import PORTS

PACKAGES = Path(__file__).parents[3]
LAST_LINES = 20
POLL_S = 0.2
SET_BY_RAY = ("OMP_NUM_THREADS",)
"""What Ray sets for a worker where nobody has: as many threads as the actor has CPUs, and one without."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node, as Ray knows it."""

    host: str
    address: str
    id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How the runner of a node ended."""

    exit_code: int
    last_lines: tuple[str, ...]


class Node:
    """An actor with some threads: `run` occupies one until its command has ended."""

    def __init__(self, kept: Sequence[str]) -> None:
        """`kept` names variables that the user passes on, whatever else sets them."""
        self._kept = frozenset(kept)
        self._keeper: subprocess.Popen[bytes] | None = None

    def where(self) -> Place:
        """Return where this actor is."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Place(socket.gethostname(), ray.util.get_node_ip_address(), str(node))

    def free_port(self) -> int:
        """Return a port of this host that nobody listens on."""
        for port in random.sample(PORTS, len(PORTS)):
            with contextlib.suppress(OSError), socket.socket() as free:
                free.bind(("", port))
                return port
        raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free")

    def sees(self, path: str) -> bool:
        """Return whether a file or folder is there."""
        return Path(path).exists()

    def run(self, words: Sequence[str], environment: Mapping[str, str]) -> Ended:
        """Run a command under a keeper. What it prints goes on to Ray's logs."""
        last = deque[str](maxlen=LAST_LINES)
        with tempfile.NamedTemporaryFile(buffering=0) as output:  # a pipe would break with this actor
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "bench.backends.ray.keeper", sys.executable, *words],
                env=inherited(os.environ, self._kept) | {"PYTHONPATH": _python_path()} | dict(environment),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with Path(output.name).open(errors="replace") as printed:
                for line in _lines(printed, self._keeper):
                    last.append(line.rstrip("\n"))
                    print(line, end="", flush=True)
        return Ended(self._keeper.wait(), tuple(last))

    def stop(self) -> None:
        """Tell the command to end: `run` returns once it has."""
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGTERM)


def _lines(printed: TextIO, process: "subprocess.Popen[bytes]") -> Iterator[str]:
    """Yield what a process writes into a file, until it has ended and all of that is read."""
    while True:
        has_ended = process.poll() is not None  # asked first: what was written last is then read too
        yield from printed
        if has_ended:
            return
        time.sleep(POLL_S)


def inherited(environment: Mapping[str, str], kept: frozenset[str]) -> dict[str, str]:
    """Return what a runner gets of a Ray worker's environment: nothing that is Ray's own."""
    return {
        name: value
        for name, value in environment.items()
        if name in kept or not (name.startswith("RAY_") or name in SET_BY_RAY)
    }


def _python_path() -> str:
    entries = filter(os.path.isabs, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys([str(PACKAGES), *entries]))
