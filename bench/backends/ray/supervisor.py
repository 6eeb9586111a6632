"""Supervise a command that must not outlive a Ray actor: `python -m bench.backends.ray.supervisor COMMAND…`.

When an actor's process ends, Ray kills its children and its process group with SIGKILL. The supervised command runs in
its own session and gets SIGTERM when this process ends, or when the actor closes its end of standard input. So the
command has time to stop its ranks and to write the run's final status.
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
"""How long the command may take to end; its ranks, and those of other nodes, get 10 s or more."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), linux/prctl.h."""


def main() -> None:
    """Exit with the command's exit code, or with 128 + the number of the signal that killed it."""
    parent = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def end_with_this_process() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(exit_code_of(-signal.SIGTERM))

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until there is a process to end
    process = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_this_process
    )
    for signum in SIGNALS:
        signal.signal(signum, lambda *_: process.terminate())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    sys.exit(exit_code_of(_supervise(process)))


def _supervise(process: "subprocess.Popen[bytes]") -> int:
    """Wait for a process and return its exit code; terminate it when standard input is closed."""
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
