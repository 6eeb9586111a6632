"""Why a runner must end before its work is done: a signal, its time limit, or a node that is gone."""

import signal
import time
from dataclasses import dataclass

from bench.errors import BenchError, with_rule

START_AGAIN = 75
"""Exit code of a run that was cut short, and goes on when the same command is started again (sysexits' EX_TEMPFAIL)."""
STOPPED = with_rule("SLU-08", "the run was cancelled")
TIME_IS_NEAR = with_rule("SLU-07", "the time limit is near")


class CutShortError(Exception):
    """The run ends before its work is done; `signum` is the signal that asked for it, SIGTERM where none did."""

    def __init__(self, why: str, signum: int = signal.SIGTERM) -> None:
        super().__init__(why)
        self.signum = signum


class NodeLostError(BenchError):
    """A node is gone, or was told to end."""

    def __init__(self, node: str, why: object) -> None:
        fix = "see what ended it: its machine, its network, or a person"
        super().__init__(f"{node} is gone: {why}", where=node, fix=fix, rule="HST-01")


@dataclass(slots=True)
class Interruption:
    """What asks this process to end. Signals only leave a note here, and whoever waits looks at it."""

    limit_s: float | None = None
    """When the time limit is near, by time.monotonic."""
    why: str | None = None
    signum: int = signal.SIGTERM

    def listen(self) -> None:
        """Take the signals: SIGTERM and Ctrl-C want the run to end, SIGUSR1 says that its time is nearly up."""
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)
        signal.signal(signal.SIGUSR1, self._warn)

    def check(self) -> None:
        """Raise CutShortError if this process must end."""
        if self.why is None and self.limit_s is not None and time.monotonic() > self.limit_s:
            self.why = TIME_IS_NEAR
        if self.why is not None:
            raise CutShortError(self.why, self.signum)

    def _stop(self, signum: int, frame: object) -> None:
        self.why, self.signum = STOPPED, signum

    def _warn(self, signum: int, frame: object) -> None:
        self.why = self.why or TIME_IS_NEAR
