"""A rank of a training of which one is delayed: `-m tests.helpers.delayed_rank WHAT RANK MS plan.json --trial 0`.

WHAT is computation, rows, evaluation or nothing: the part that takes so many milliseconds longer on this rank.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from jobs.ranks import rank_times
from jobs.tasks import train


def delayed(function: Callable[..., Any], delay_s: float, *, is_due: Callable[[dict[str, Any]], bool]) -> Any:
    def run(*args: Any, **others: Any) -> Any:
        if is_due(others):
            time.sleep(delay_s)
        return function(*args, **others)

    return run


def main() -> None:
    rank_times.WINDOW_S = 0.0  # windows of ten steps, so that as many are judged on a fast machine as on a slow one
    what, rank, delay_s = sys.argv[1], sys.argv[2], float(sys.argv[3]) / 1000
    sys.argv[1:4] = []
    if os.environ["RANK"] == rank and what != "nothing":
        from jobs.engines.megatron import loop

        if what == "rows":
            loop.micro_batches = delayed(loop.micro_batches, delay_s, is_due=lambda others: True)
        else:
            is_due = (lambda o: o["forward_only"]) if what == "evaluation" else (lambda o: not o["forward_only"])
            loop._no_pipeline = delayed(loop._no_pipeline, delay_s, is_due=is_due)
    train.main()


if __name__ == "__main__":
    main()
