"""Run Enroot and squashfs-tools; the programs are stopped when the caller ends."""

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
"""How long a program may take to exit after SIGTERM: Enroot first removes about 20 GB of unpacked small files."""
PACKAGES = {
    "enroot": "install Enroot (https://github.com/NVIDIA/enroot), or import the image on a node with Enroot",
    "unsquashfs": "install squashfs-tools (Debian, Ubuntu, RHEL: package squashfs-tools)",
    "mksquashfs": "install squashfs-tools (Debian, Ubuntu, RHEL: package squashfs-tools)",
    "docker": "import the image on a machine with Docker, or push it to a registry and import it from there",
    "podman": "import the image on a machine with Podman, or push it to a registry and import it from there",
}


class Ended(NamedTuple):
    """The exit code of a program and the last lines of its stderr."""

    exit_code: int
    lines: list[str]


def require(*programs: str) -> None:
    """Raise ConfigError for the first program that is not on PATH."""
    for program in programs:
        if shutil.which(program) is None:
            raise ConfigError(f"{program} is not on PATH", where="this machine", fix=PACKAGES[program])


def run(argv: Sequence[str], *, listen: Callable[[str], None] | None = None, keep_open: Sequence[int] = ()) -> Ended:
    """Run a program; its stdout is dropped, and each line of its stderr is passed to `listen` immediately.

    On Ctrl-C or an error, the program and all its children are stopped.
    """
    lines: deque[str] = deque(maxlen=200)
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches only this process, which then stops the program
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
    """Return the output of `PROGRAM version`, or None."""
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
