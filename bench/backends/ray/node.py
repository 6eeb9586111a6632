"""One node of a run, as an actor: it says where it is, and runs the runner until that ends or is told to."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contract.schema import PORTS

PACKAGES = Path(__file__).parents[3]
LAST_LINES = 20
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
        self._keeper: subprocess.Popen[str] | None = None

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
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "bench.backends.ray.keeper", sys.executable, *words],
            env=inherited(os.environ, self._kept) | {"PYTHONPATH": _python_path()} | dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        last = deque[str](maxlen=LAST_LINES)
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            last.append(line.rstrip("\n"))
            print(line, end="", flush=True)
        return Ended(self._keeper.wait(), tuple(last))

    def stop(self) -> None:
        """Tell the command to end: `run` returns once it has."""
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGTERM)


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
