"""The programs that images need: Enroot and squashfs-tools, run so that none of them outlives its caller."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bench.errors import ConfigError
from bench.mlperf.reader import printable

GRACE_S = 120.0
"""How long a program may tidy up once it is told to end: Enroot removes what it has unpacked, 20 GB of small files."""
PACKAGES = {
    "enroot": "install Enroot (https://github.com/NVIDIA/enroot), or import on a node that has it",
    "unsquashfs": "install squashfs-tools (Debian, Ubuntu, RHEL: package squashfs-tools)",
    "mksquashfs": "install squashfs-tools (Debian, Ubuntu, RHEL: package squashfs-tools)",
    "docker": "import where Docker is, or push the image to a registry and import it from there",
    "podman": "import where Podman is, or push the image to a registry and import it from there",
}


class Ended(NamedTuple):
    """How a program ended, and the last lines that it wrote to stderr."""

    exit_code: int
    lines: list[str]


def require(*programs: str) -> None:
    """Raise ConfigError on the first program that is not on PATH."""
    for program in programs:
        if shutil.which(program) is None:
            raise ConfigError(f"{program} is not on PATH", where="this machine", fix=PACKAGES[program])


def run(argv: Sequence[str], *, listen: Callable[[str], None] | None = None, keep_open: Sequence[int] = ()) -> Ended:
    """Return how a program ended; its stdout is dropped, each line of its stderr goes to `listen` as it comes.

    Left early, by Ctrl-C or an error, it ends the program and everything that it started.
    """
    lines: deque[str] = deque(maxlen=200)
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the program in order
        pass_fds=keep_open,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(printable(line.rstrip().replace("\t", " ")))
            if listen:
                listen(lines[-1])
        return Ended(process.wait(), list(lines))
    finally:
        _end(process)


def version(program: str) -> str | None:
    """Return what `PROGRAM version` prints, or None."""
    try:
        done = subprocess.run([program, "version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _end(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE_S)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stderr is not None:
        process.stderr.close()
