"""The title of a result."""

import re

from bench.mlperf.reader import printable
from bench.mlperf.result import Result


def title(result: Result) -> str:
    """Return benchmark and platform as a title; a task that is marked as not a submission keeps its own name."""
    name = task_of_mark(result.platform) or result.benchmark or "training"
    return printable(f"{name} on {result.platform or 'unknown platform'}")


def task_of_mark(platform: str | None) -> str | None:
    """Return the task in the `not a submission` mark of a platform; None without the mark."""
    marked = _TASK_OF_MARK.search(platform or "")
    return marked[1] if marked else None


_TASK_OF_MARK = re.compile(r"\(([\w.-]{1,80}): (?:random weights, )?not a submission\)")
"""How a plan marks the platform of a task that may not be submitted: `laptop (lora_tiny: not a submission)`."""
