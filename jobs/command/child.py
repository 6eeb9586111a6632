"""The program as a child process: start it, read what it prints line by line, and end it with all that it started.

The program has its own process group. It gets SIGTERM when its runner ends for any reason (bound.py). Processes that it
starts and leaves become children of the runner (PR_SET_CHILD_SUBREAPER), so that none of them outlives the trial.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from bench.errors import ConfigError

PR_SET_CHILD_SUBREAPER = 36
"""Source: prctl(2), linux/prctl.h."""
BOUND = Path(__file__).parents[2] / "bench/backends/nodes/bound.py"
CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
"""The rest of a longer line is dropped; an MLLOG record is at most this long."""
KEPT_BYTES, TAIL_BYTES = 16 << 20, 1 << 16
"""Of the output of one attempt, the first and the last bytes that are kept; the rest is read and counted only."""
SETTLE_S = 2.0
"""How long processes that the program has started may take to end after it, such as data workers."""


class Lines:
    """Splits a stream of bytes into lines, which end with a line feed or, as in progress bars, a carriage return."""

    def __init__(self) -> None:
        self._rest, self._is_cut = b"", False
        self.num_lines = self.num_cut = 0

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the complete lines, without empty ones. Bytes that are not UTF-8 are replaced."""
        *complete, rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for place, line in enumerate(complete):
            if not (place == 0 and self._is_cut):
                yield from self._line(line)
        self._is_cut = self._is_cut and not complete
        if len(rest) > MAX_LINE_BYTES and not self._is_cut:
            self.num_cut += 1
            yield from self._line(rest[:MAX_LINE_BYTES])
            self._is_cut = True
        self._rest = b"" if self._is_cut else rest

    def finish(self) -> Iterator[str]:
        """Yield the last line, if it has no line break."""
        rest, self._rest = self._rest, b""
        yield from self._line(rest) if not self._is_cut else ()

    def _line(self, raw: bytes) -> Iterator[str]:
        if raw:
            self.num_lines += 1
            yield raw.decode(errors="replace")


class Kept:
    """Copies the output of the program to the output of this process, which is in rank_logs; a flood is bounded."""

    def __init__(self, file: int = 1, most: int = KEPT_BYTES) -> None:
        self._file, self._room, self._tail, self._num_tail = file, most, deque[bytes](), 0
        self.num_bytes = self.num_dropped = 0

    def write(self, chunk: bytes) -> None:
        self.num_bytes += len(chunk)
        now, later = chunk[: self._room], chunk[self._room :]
        self._room -= len(now)
        _write(self._file, now)
        if later:
            self._tail.append(later)
            self._num_tail += len(later)
        while self._tail and self._num_tail - len(self._tail[0]) >= TAIL_BYTES:
            first = self._tail.popleft()
            self._num_tail -= len(first)
            self.num_dropped += len(first)

    def finish(self) -> None:
        """Write the end of a flood."""
        if self.num_dropped:
            _write(self._file, f"\n… {self.num_dropped:,} bytes of output are not kept …\n".encode())
        for chunk in self._tail:
            _write(self._file, chunk)
        self._tail.clear()


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


class Child:
    """The running program."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Start it.

        Raises:
            ConfigError: the working folder does not exist.
        """
        with suppress(OSError, AttributeError):  # not Linux: only the process group is ended
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        with suppress(OSError, AttributeError):  # Slurm gives each rank its own CPUs; this program may use all of them
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        bound = [sys.executable, "-I", "-S", str(BOUND), str(os.getpid())]
        self._others = {child.pid for child in psutil.Process().children(recursive=True)}
        try:
            self._process = subprocess.Popen(
                [*bound, *argv],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            what, where = f"{folder} is not a folder: {error.strerror}", "engine.command.folder"
            fix = "set engine.command.folder to a folder that exists on every node"
            raise ConfigError(what, where=where, fix=fix) from error
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self.is_open = True
        """Whether a process can still write to the output."""

    def read(self, wait_s: float) -> bytes:
        """Return the next bytes of the output; empty if there are none within wait_s."""
        if not self.is_open:
            time.sleep(wait_s)
            return b""
        if not select.select([self._output], [], [], wait_s)[0]:
            return b""
        with suppress(BlockingIOError):
            chunk = os.read(self._output, CHUNK_BYTES)
            self.is_open = bool(chunk)
            return chunk
        return b""

    @property
    def exit_code(self) -> int | None:
        """The exit code of the program, negative for a signal; None while it runs."""
        return self._process.poll()

    def state(self) -> str:
        """Return what the operating system says about the program and the processes that it started."""
        states = []
        for process in self._started():
            with suppress(psutil.Error):
                states.append(f"{process.name()} ({process.pid}) is {process.status()}")
        return ", ".join(states[:8]) or "it has ended"

    def left(self) -> list[str]:
        """Return the processes that the program abandoned, after they had some time to end."""
        psutil.wait_procs(self._started(), timeout=SETTLE_S)
        left = []
        for process in self._started():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    left.append(f"{process.name()} ({process.pid})")
        return left

    def stop(self, within_s: float) -> None:
        """Send SIGTERM to the program's process group, wait, and kill everything that it started."""
        if self.exit_code is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(within_s)
        left = self._started()
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)

    def _started(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children(recursive=True) if child.pid not in self._others]
