"""DeepSpeed: `step=10, skipped=0, lr=[…], mom=[…]`, and of its pipeline engine `steps: 10 loss: … iter time (s): …`.

Both are printed every steps_per_print steps, the first only with "log_level": "info" in DeepSpeed's config. It has no
loss: DeepSpeed does not know the loss of a program. If the program prints its own, read it with the adapter plain.
Lines of wall_clock_breakdown are not read: they do not count steps, and their parts (fwd, bwd, step) leave out the rest
of a step, such as its rows. The lines contain no tokens.

Source: DeepSpeed 0.19.8, runtime/engine.py, _report_progress; runtime/pipe/engine.py, train_batch.
"""

import re

from bench.contract.program import Program
from jobs.command.adapters import Reported

_STEP = re.compile(r".*\bstep=(\d{1,12}), skipped=\d+, lr=\[")
_NUMBER = r"(-?\d+\.\d+|-?inf|nan)"
_OF_PIPELINE = re.compile(rf".*\bsteps: (\d{{1,12}}) loss: {_NUMBER} (?:.* )?iter time \(s\): (\d+\.\d+) samples/sec: ")


class Reader:
    """Reads the lines of both engines."""

    def __init__(self, program: Program) -> None: ...

    def read(self, line: str) -> Reported | None:
        if match := _OF_PIPELINE.match(line):
            return Reported(step=int(match[1]), loss=float(match[2]), step_time_s=float(match[3]))
        match = _STEP.match(line)
        return Reported(step=int(match[1])) if match else None

    def finished(self) -> Reported | None:
        return None
