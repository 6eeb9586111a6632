"""What a result is called, as a headline."""

import re

from bench.mlperf.reader import printable
from bench.mlperf.result import Result


def title(result: Result) -> str:
    """Return what was measured where, as a headline; a stand-in for a benchmark goes by the name of its task."""
    name = task_of_mark(result.platform) or result.benchmark or "training"
    return printable(f"{name} on {result.platform or 'a platform that is not logged'}")


def task_of_mark(platform: str | None) -> str | None:
    """Return the task in a platform's mark of what may not be submitted; None without the mark."""
    marked = _TASK_OF_MARK.search(platform or "")
    return marked[1] if marked else None


_TASK_OF_MARK = re.compile(r"\(([\w.-]{1,80}): (?:random weights, )?not a submission\)")
"""How a plan marks the platform of a task that may not be submitted: `laptop (lora_tiny: not a submission)`."""
