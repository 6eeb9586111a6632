"""What the queue says of the job that is watched."""

import math
import time
from contextlib import suppress
from pathlib import Path

from bench.backends import JobState
from bench.contract.run_files import STATUS
from bench.errors import BenchError
from bench.runs import run as runs

QUESTIONS_S = 10.0
"""How long an answer of the queue holds."""


class Queue:
    """The state of a run's job; the backend is asked at most every QUESTIONS_S seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._asked_s = folder, -math.inf
        self._run: runs.Run | None = None

    def is_over(self) -> bool:
        """Whether the job has written its status, or Slurm says that it has ended."""
        if (self._folder / STATUS).exists():
            return True
        run = self._look()
        return run is not None and run.state is not None and not run.is_active

    @property
    def waits_for(self) -> str:
        """What a trial that has not begun waits for."""
        run = self._look()
        if run is None or run.state is None or run.state.state is JobState.running:
            return "the first line of its log"
        return f"job {run.jobs[-1]}: {run.state.word}" + (f" ({run.state.reason})" if run.state.reason else "")

    def _look(self) -> runs.Run | None:
        if time.monotonic() - self._asked_s > QUESTIONS_S:
            self._asked_s = time.monotonic()
            with suppress(BenchError):
                self._run = runs.find(self._folder)
        return self._run
