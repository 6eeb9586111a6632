"""Interruptions of a runner: a signal, the time limit, or a lost node."""

import signal
import time
from dataclasses import dataclass

from bench.errors import BenchError, with_rule

RESTART_EXIT_CODE = 75
"""Exit code of an interrupted run, which resumes when the same command is restarted (EX_TEMPFAIL of sysexits.h)."""
STOPPED = with_rule("SLU-08", "the run was cancelled, or stopped by a signal")
TIME_IS_NEAR = with_rule("SLU-07", "the time limit is near")


class CutShortError(Exception):
    """The run is interrupted; `signum` is the signal that caused it, SIGTERM if there was none."""

    def __init__(self, why: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(why)
        self.signum = signum


class NodeLostError(BenchError):
    """A node is lost or was stopped."""

    def __init__(self, node: str, why: object) -> None:
        fix = "check the machine and the network of this node, and whether its runstop process was killed"
        super().__init__(f"{node} was lost: {why}", where=node, fix=fix, rule="HST-01")


@dataclass(slots=True)
class Interruption:
    """A pending interruption of this process. Signal handlers only record it; waiting loops call `check`."""

    limit_s: float | None = None
    """The time.monotonic value from which on the time limit is near."""
    why: str | None = None
    signum: int = signal.SIGTERM

    def listen(self) -> None:
        """Install signal handlers: SIGTERM and SIGINT cancel the run, SIGUSR1 warns that the time limit is near."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        signal.signal(signal.SIGUSR1, self._warn)

    def check(self) -> None:
        """Raise CutShortError if an interruption is pending."""
        if self.why is None and self.limit_s is not None and time.monotonic() > self.limit_s:
            self.why = TIME_IS_NEAR
        if self.why is not None:
            raise CutShortError(self.why, self.signum)

    def _stop(self, signum: int, frame: object) -> None:
        self.why, self.signum = STOPPED, signum

    def _warn(self, signum: int, frame: object) -> None:
        self.why = self.why or TIME_IS_NEAR
