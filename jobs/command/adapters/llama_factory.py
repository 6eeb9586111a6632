"""LLaMA-Factory: the JSON lines of trainer_log.jsonl, or else the lines of transformers' Trainer in its output.

Set engine.command.file to trainer_log.jsonl in the program's output_dir: only there steps are counted, and tokens, with
include_num_input_tokens_seen. total_tokens is a sum since the start of the training.

Source: LLaMA-Factory 0.9.6.dev0 (ff6d4d12), src/llamafactory/train/callbacks.py, LogCallback.
"""

import json
from typing import Any

from bench.contract.program import Program
from jobs.command.adapters import Reported, hf_trainer


class Reader:
    """Reads either of both; a line of one is never a line of the other."""

    def __init__(self, program: Program) -> None:
        self._printed = hf_trainer.Reader(program)
        self._step, self._tokens = 0, 0.0

    def read(self, line: str) -> Reported | None:
        if '"current_steps"' not in line:
            return self._printed.read(line)
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            return None  # half of a line
        step = raw.get("current_steps") if isinstance(raw, dict) else None
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            return None
        eval_loss = _number(raw, "eval_loss")
        if eval_loss is not None:
            return Reported(step=step, eval_loss=eval_loss)
        return Reported(step=step, loss=_number(raw, "loss"), tokens=self._tokens_per_step(step, raw))

    def _tokens_per_step(self, step: int, raw: dict[str, Any]) -> float | None:
        total = _number(raw, "total_tokens")
        if total is None or step <= self._step:
            return None
        tokens = (total - self._tokens) / (step - self._step)
        self._step, self._tokens = step, total
        return tokens

    def finished(self) -> Reported | None:
        return None


def _number(raw: dict[str, Any], name: str) -> float | None:
    value = raw.get(name)
    try:
        return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        return None
