"""Bind a rank to the process that starts it, then become the rank: `python -I -S bound.py LAUNCHER WORD…`.

LAUNCHER is the process id of the launcher, which passes its own. The kernel sends SIGTERM to this process, whatever it
runs, as soon as the launcher ends: a rank whose launcher is killed ends even while it imports its packages. The rank's
command replaces this program, so a rank is still a child of its launcher. Standard library only, and no site-packages:
it takes 20 ms.
"""

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
"""Source: prctl(2), linux/prctl.h."""
NOT_STARTED = 127
"""Exit code for a command that cannot be started; the same as a shell's."""


def main() -> None:
    launcher, *words = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a launcher that waits for signals in a thread has blocked them
    with suppress(OSError, AttributeError):  # not Linux: the rank itself notices the end of its parent
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(launcher):  # the launcher ended before prctl
        sys.exit(128 + signal.SIGTERM)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(NOT_STARTED)


if __name__ == "__main__":
    main()
