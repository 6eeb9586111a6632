"""Megatron-LM and Megatron-Bridge: lines of fields that end with `|`.

`[…] iteration 10/ 100 | consumed samples: … | elapsed time per iteration (ms): … | … | lm loss: 1.23E+01 | …` after a
step, and `validation loss at iteration 10 | lm loss value: … |` after an evaluation. Lines of the test set, and of
several validation sets, are not read. The lines contain no tokens. They are printed by the last rank, not by rank 0.

A loss is left out unless it is at least 0. So a complete line without a loss, and without a skipped iteration, has a
loss of NaN.

Source: Megatron-LM 0.20.0 (d98e8a64), megatron/training/training.py, training_log and evaluate_and_print_results;
Megatron-Bridge 0.7.0 (067f987d), training/utils/train_utils.py and training/eval.py.
"""

import math
import re

from bench.contract.program import Program
from jobs.command.adapters import Reported

_STEP = re.compile(r".*\biteration +(\d{1,12})/ *(\d{1,12}) \| consumed samples:(.*)")
_EVALUATION = re.compile(
    r".*\bvalidation loss at iteration (\d{1,12})(?: on validation set)? \| lm loss value: ([^|\s]+) \|"
)
LOSS, TIME_MS = "lm loss", "elapsed time per iteration (ms)"
SKIPPED, LAST = "number of skipped iterations", "number of nan iterations"


class Reader:
    """Reads the newest record of a line; a field without its `|` is cut, and is left out."""

    def __init__(self, program: Program) -> None: ...

    def read(self, line: str) -> Reported | None:
        if match := _EVALUATION.match(line):
            loss = _number(match[2])
            return None if loss is None else Reported(step=int(match[1]), eval_loss=loss)
        if not (match := _STEP.match(line)) or int(match[1]) > int(match[2]):
            return None
        fields = [field.partition(":") for field in match[3].split("|")[1:-1]]
        values = {name.strip(): _number(text.strip()) for name, _, text in fields}
        time_ms, loss = values.get(TIME_MS), values.get(LOSS)
        if LOSS not in values and LAST in values and values.get(SKIPPED) == 0:
            loss = math.nan
        return Reported(step=int(match[1]), loss=loss, step_time_s=None if time_ms is None else time_ms / 1000)

    def finished(self) -> Reported | None:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
