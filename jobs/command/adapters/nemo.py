"""NeMo 2.0 with its ProgressPrinter: `Training epoch 0, iteration 9/99 | lr: … | reduced_train_loss: 1.23 | …`.

Iterations and global_step count from 0; iterations begin again with each epoch. The printer repeats the newest val_loss
in all lines after an evaluation, and averages it over its log_interval. So an evaluation is read where val_loss changes
between two lines of consecutive steps, and one after the last step is never seen. Its line then reports the
evaluation only. The lines contain no tokens. The interactive progress bar (MegatronProgressBar) is not read.

Source: NeMo 2.6.0rc0 (8cfedd72), nemo/lightning/pytorch/callbacks/progress_printer.py; strategies/megatron_strategy.py
for the names of the values.
"""

import re

from bench.contract.program import Program
from jobs.command.adapters import Reported

_STEP = re.compile(r".*\bTraining epoch (\d{1,12}), iteration (\d{1,12})/(\d{1,12}) \| (.*)")
LOSS, TIME_S, STEP, EVALUATION = "reduced_train_loss", "train_step_timing in s", "global_step", "val_loss"


class Reader:
    """Reads the lines of the printer. The last value of a line may be cut: only an evaluation or a time may be last."""

    def __init__(self, program: Program) -> None:
        self._step = -1
        self._eval_loss: float | None = None

    def read(self, line: str) -> Reported | None:
        if not (match := _STEP.match(line)):
            return None
        fields = [field.partition(": ") for field in match[4].split(" | ")]
        last = fields[-1][0]
        values = {name: _number(text) for name, _, text in fields if name != last or name in (EVALUATION, TIME_S)}
        counted = values.get(STEP)
        if counted is None and match[1] != "0":
            return None
        before, self._step = self._step, int(match[2] if counted is None else counted) + 1
        eval_loss = values.get(EVALUATION)
        is_new = eval_loss is not None and eval_loss != self._eval_loss and before == self._step - 1
        self._eval_loss = eval_loss
        if is_new and int(match[2]) < int(match[3]):
            return Reported(step=before, eval_loss=eval_loss)
        return Reported(step=self._step, loss=values.get(LOSS), step_time_s=values.get(TIME_S))

    def finished(self) -> Reported | None:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
