"""Run a command that must not outlive an actor: `python -m bench.backends.ray.keeper COMMAND…`.

Ray kills the children of an actor's process with SIGKILL, and its process group as well, whenever that process ends.
The command is in a session of its own, and gets SIGTERM when this process is gone, or when the actor that holds the
other end of standard input is: it can end its ranks, and write its last word.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys

from bench.errors import exit_code_of

POLL_S = 0.1
GRACE_S = 90.0
"""How long the command may take to end: its ranks, and those of other nodes, have 10 s and more."""
_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), linux/prctl.h."""


def main() -> None:
    """Exit as the command does, with 128 + the number of a signal that has killed it."""
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def end_with_this_process() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was too late
            os._exit(exit_code_of(-signal.SIGTERM))

    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_this_process
    )
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: process.terminate())
    sys.exit(exit_code_of(_watched(process)))


def _watched(process: "subprocess.Popen[bytes]") -> int:
    """Return the exit code of a process, which is ended when nobody holds the other end of standard input any more."""
    while process.poll() is None:
        if select.select([0], [], [], POLL_S)[0] and not os.read(0, 1):
            process.terminate()
            try:
                return process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()
    return process.returncode


if __name__ == "__main__":
    main()
