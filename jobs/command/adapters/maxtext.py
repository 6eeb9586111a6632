"""MaxText: `completed step: 5, seconds: 1.234, TFLOP/s/device: …, total_weights: 8192, loss: 10.123, …`.

Its steps count from 0. total_weights is the number of tokens of the step that count in the loss, of all devices. After
an evaluation: `Completed eval after train step 5, loss=10.123, …`. The line of a step is printed during the next one.

Source: MaxText 0.2.4 (e591f30c), src/maxtext/common/metric_logger.py.
"""

import re

from bench.contract.program import Program
from jobs.command.adapters import Reported

_NUMBER = r"(-?\d+\.\d{3}|-?inf|nan)"
_STEP = re.compile(r".*\bcompleted (?:profiler activation/deactivation )?step: (\d{1,12}), (.*)")
_TIME_S = re.compile(r"seconds: (\d+\.\d{3}),")
_TOKENS = re.compile(r"(?:.*, )?total_weights: (\d+(?:\.\d+)?), ")
_LOSS = re.compile(rf"(?:.*, )?loss: {_NUMBER}(?:,|$)")
_EVALUATION = re.compile(rf".*\bCompleted eval after train step (\d{{1,12}}), loss={_NUMBER},")


class Reader:
    """Reads the newest record of a line."""

    def __init__(self, program: Program) -> None: ...

    def read(self, line: str) -> Reported | None:
        if match := _EVALUATION.match(line):
            return Reported(step=int(match[1]) + 1, eval_loss=float(match[2]))
        if not (match := _STEP.match(line)):
            return None
        time_s, tokens, loss = (pattern.match(match[2]) for pattern in (_TIME_S, _TOKENS, _LOSS))
        return Reported(
            step=int(match[1]) + 1,
            loss=float(loss[1]) if loss else None,
            tokens=float(tokens[1]) if tokens else None,
            step_time_s=float(time_s[1]) if time_s else None,
        )

    def finished(self) -> Reported | None:
        return None
