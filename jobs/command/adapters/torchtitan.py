"""torchtitan: `step: 10  loss:  8.12345  grad_norm: …  memory: …  tps: …` and `validate step: 10  loss: …`, in colours.

With pipeline parallelism only the last stage has a loss; the other ranks print a negative number, which is left out.
tps are tokens per second of one device since the last line, so the lines contain neither the tokens of a step nor its
time. torchtitan prints step 1, and then every metrics.log_freq steps.

Source: torchtitan 0.2.2 (b5bcd76c), torchtitan/components/metrics.py, MetricsProcessor.log and log_validation;
torchtitan/trainer.py, forward_backward_step.
"""

import re

from bench.contract.program import Program
from jobs.command.adapters import Reported

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(r".*\bstep: +(\d{1,12})  loss: +(-?\d+\.\d{5}|-?inf|nan)  grad_norm: ")
_EVALUATION = re.compile(r".*\bvalidate step: +(\d{1,12})  loss: +(-?\d+\.\d{4}|-?inf|nan)  memory: ")
"""Even the end of a line of an evaluation differs from that of a step: by its digits, and by grad_norm."""


class Reader:
    """Reads the newest record of a line."""

    def __init__(self, program: Program) -> None: ...

    def read(self, line: str) -> Reported | None:
        if "loss:" not in line:
            return None
        plain = _COLOUR.sub("", line)
        if match := _EVALUATION.match(plain):
            return None if float(match[2]) < 0 else Reported(step=int(match[1]), eval_loss=float(match[2]))
        if match := _STEP.match(plain):
            return Reported(step=int(match[1]), loss=None if float(match[2]) < 0 else float(match[2]))
        return None

    def finished(self) -> Reported | None:
        return None
