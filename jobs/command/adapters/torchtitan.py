"""torchtitan: `step: 10  loss:  8.12345  grad_norm: …  memory: …  tps: …` and `validate step: 10  loss: …`, in colours.

With pipeline parallelism only the last stage has a loss; the other ranks print a negative number, which is left out.
tps are tokens per second of one device since the last line, so the lines contain neither the tokens of a step nor its
time. torchtitan prints step 1, and then every metrics.log_freq steps.

Source: torchtitan 0.2.2 (b5bcd76c), torchtitan/components/metrics.py, MetricsProcessor.log and log_validation;
torchtitan/trainer.py, forward_backward_step.
"""

import re

from bench.contract.program import Program
from jobs.command.adapters import Said

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"(-?\d+\.\d+|-?inf|nan)"
_STEP = re.compile(rf".*\b(validate step|(?<!validate )step): +(\d{{1,12}})  loss: +{_NUMBER}  (?:grad_norm|memory): ")


class Reader:
    """Reads the newest record of a line."""

    def __init__(self, program: Program) -> None: ...

    def read(self, line: str) -> Said | None:
        if "loss:" not in line or not (match := _STEP.match(_COLOUR.sub("", line))):
            return None
        step, loss = int(match[2]), float(match[3])
        is_known = not loss < 0
        if match[1] == "step":
            return Said(step=step, loss=loss if is_known else None)
        return Said(step=step, eval_loss=loss) if is_known else None

    def finished(self) -> Said | None:
        return None
