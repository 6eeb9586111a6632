"""Measures the cost of timing each rank (jobs.ranks.rank_times): alternating blocks of steps with and without it.

    python experiments/rank_times_cost.py [--pairs N] [--seconds S] [--json FILE] \\
        task=pretrain_gpt3_126m cluster=local cluster.ranks_per_node=1 model.weights=random

One process holds the engine of one rank and keeps training, as in experiments/telemetry_cost.py, which explains the
pairs and what is printed. In one block of a pair the marks are recorded, and their medians are gathered and judged at
every log line; in the other one not. Both read the loss at every log line. With a single rank there is no waiting: the
marks cost the same, and the gathering does not wait for others either. On a GPU the pairs have wall-clock time; on a
CPU, the CPU time of the process. Exit code 1: a cost below the limit is not shown.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_rank import join, known_words, synchronize
from telemetry_cost import UNTIMED_STEPS, Block, compared

from bench.contract import mllog
from bench.contract.plan import Plan
from jobs.ranks import rank_times, timing
from jobs.ranks.rank_times import RankTimes
from jobs.ranks.slow_ranks import Place, SlowRanks

LOG_EVERY = 10
WAITS = 2
"""Per step of the engine megatron: for the gradients and for their norm."""
Step = Callable[[], Any]


def main() -> int:
    return compared(__doc__, prepared, num_pairs=20)


def prepared(plan: Plan, seconds: float) -> tuple[int, Block]:
    """Print the cost without any step; return a block of about as many seconds, after a few steps that compile."""
    join(plan, 0)
    print(f"marks and exchange alone: {alone_us():.1f} us of CPU time per step")
    from jobs.engines.megatron import loop, model

    engine, rows, gbs = model.build(plan, seed=1), known_words(plan, 0), plan.batch.global_batch_size

    def step() -> Any:
        return loop.train_step(engine, rows, np.arange(gbs), step=1)

    def read(share: Any) -> None:
        loop.mean_loss(share, gbs)

    block(step, read, LOG_EVERY, is_on=False)
    num_steps = max(LOG_EVERY, round(seconds / block(step, read, LOG_EVERY, is_on=False) / LOG_EVERY) * LOG_EVERY)
    return num_steps, lambda is_on: block(step, read, num_steps, is_on=is_on)


def alone_us(num_steps: int = 20_000) -> float:
    """Return the CPU time of this thread for the marks of a step and its share of an exchange, without any step."""
    times = measurement(is_on=True)
    times.begin(timing.now())
    began = time.thread_time()
    for number in range(1, num_steps + 1):
        with rank_times.loading():
            pass
        for _ in range(WAITS):
            with rank_times.waiting():
                pass
        times.stepped(timing.now())
        if number % LOG_EVERY == 0:
            synchronize()
            times.exchange(number)
    took_s = time.thread_time() - began
    times.finish()
    return 1e6 * took_s / num_steps


def measurement(*, is_on: bool) -> RankTimes:
    return RankTimes(SlowRanks([Place("here", 0)], [0], Path(), trial=0) if is_on else None, mllog.Writer(None))


def block(step: Step, read: Callable[[Any], None], num_steps: int, *, is_on: bool) -> float:
    """Return the seconds per step of one block."""
    times = measurement(is_on=is_on)
    for _ in range(UNTIMED_STEPS):
        step()
    synchronize()
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = clock()
    times.begin(timing.now())
    for number in range(1, num_steps + 1):
        share = step()
        times.stepped(timing.now())
        if number % LOG_EVERY == 0:
            read(share)
            times.exchange(number)
    synchronize()
    took_s = clock() - began
    times.finish()
    return took_s / num_steps


if __name__ == "__main__":
    sys.exit(main())
