"""The Trainer of transformers, and TRL's trainers, which are subclasses of it.

Every logging_steps it prints a dict {'loss': …, 'grad_norm': …, 'learning_rate': …, 'epoch': …}, after an evaluation
{'eval_loss': …, 'eval_runtime': …, 'epoch': …}, and at the end {'train_runtime': …, 'train_loss': …, 'epoch': …}. From
version 5 on the values are texts. The lines do not count steps, so the reader does: engine.command.every_steps must be
the Trainer's logging_steps. trainer_state.json (engine.command.file) has the number of steps, and is compared with it.

Source: transformers 5.23.0, trainer_callback.py, PrinterCallback and ProgressCallback; trainer.py, Trainer.train.
"""

import ast
import json
from pathlib import Path
from typing import Any

from bench.contract.program import Program
from jobs.command.adapters import Reported, Unreadable


class Reader:
    """Reads the printed dicts, and trainer_state.json at the end."""

    def __init__(self, program: Program) -> None:
        self._every_steps, self._file, self._steps = program.every_steps, program.file, 0

    def read(self, line: str) -> Reported | None:
        start = line.find("{'")  # a progress bar may be in front of it
        if start < 0:
            return None
        try:
            raw = ast.literal_eval(_with_numbers(line[start:].strip()))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None  # another dict, or half of one
        if not isinstance(raw, dict):
            return None
        if "loss" in raw:
            self._steps += self._every_steps
            return Reported(step=self._steps, loss=_number(raw, "loss"))
        if "eval_loss" in raw:
            return Reported(eval_loss=_number(raw, "eval_loss"), eval_time_s=_number(raw, "eval_runtime"))
        if "train_runtime" in raw:
            return Reported(total_time_s=_number(raw, "train_runtime"))
        return None

    def finished(self) -> Reported | None:
        if self._file is None:
            return None
        try:
            state = json.loads(Path(self._file).read_text())
            steps, every = state["global_step"], state.get("logging_steps")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unreadable(f"{Path(self._file).name} cannot be read: {error}") from error
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise Unreadable(f"global_step in {Path(self._file).name} is {steps!r:.40}, but must be a number")
        if not 0 <= steps - self._steps < self._every_steps:
            fix = "set engine.command.every_steps to the Trainer's logging_steps"
            raise Unreadable(
                f"{Path(self._file).name} has {steps} steps (logging_steps {every}), but the lines that the Trainer "
                f"printed have {self._steps} steps: {fix}"
            )
        return Reported(step=steps) if steps > self._steps else None


def _with_numbers(text: str) -> str:
    """Return the text of a dict with nan and inf, which Python prints without quotes, as texts."""
    for name in ("nan", "-inf", "inf"):
        text = text.replace(f": {name},", f": '{name}',").replace(f": {name}}}", f": '{name}'}}")
    return text


def _number(raw: dict[Any, Any], name: str) -> float | None:
    try:
        return float(raw[name])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
