"""Measures the cost of timing each rank (jobs.ranks.rank_times): alternating blocks of steps with and without it.

    python experiments/rank_times_cost.py [--pairs N] [--seconds S] [--json FILE] \\
        task=pretrain_gpt3_126m cluster=local cluster.ranks_per_node=1 model.weights=random

One process holds the engine of one rank and keeps training, as in experiments/telemetry_cost.py, which explains the
pairs and what is printed. In one block of a pair the marks are recorded, and their medians are gathered and judged at
every log line; in the other one not. Both read the loss at every log line. With a single rank there is no waiting: the
marks cost the same, and the gathering does not wait for others either. On a GPU the pairs have wall-clock time; on a
CPU, the CPU time of the process. Exit code 1: a cost below the limit is not shown.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from one_rank import join, known_words, require, synchronize
from telemetry_cost import UNTIMED_STEPS, Pair, reported

from bench.contract import mllog
from bench.contract.plan import Plan
from bench.errors import BenchError
from bench.planning import compose
from jobs.ranks import rank_times, timing
from jobs.ranks.rank_times import RankTimes
from jobs.ranks.slow_ranks import Place, SlowRanks

LOG_EVERY = 10
WAITS = 2
"""Per step of the engine megatron: for the gradients and for their norm."""
Step = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for bench.launch")
    parser.add_argument("--pairs", type=int, default=20, help="number of pairs (default 20)")
    parser.add_argument("--seconds", type=float, default=3.0, help="minimum duration of a block (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the order within pairs")
    parser.add_argument("--json", type=Path, help="where to write the pairs")
    args = parser.parse_args()
    try:
        plan = compose.compose(args.overrides)
        require(plan, 0)
    except BenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    join(plan, 0)
    print(f"marks and exchange alone: {alone_us():.1f} us of CPU time per step")
    pairs = list(measured(plan, args.pairs, seconds=args.seconds, order=random.Random(args.seed)))
    if args.json:
        args.json.write_text(json.dumps([asdict(pair) for pair in pairs]))
    return 0 if reported(pairs) else 1


def measured(plan: Plan, num_pairs: int, *, seconds: float, order: random.Random) -> Iterator[Pair]:
    """Yield pairs of blocks, each of about as many seconds, after a few steps that compile."""
    from jobs.engines.megatron import loop, model

    engine, rows, gbs = model.build(plan, seed=1), known_words(plan, 0), plan.batch.global_batch_size

    def step() -> Any:
        return loop.train_step(engine, rows, np.arange(gbs), step=1)

    def read(share: Any) -> None:
        loop.mean_loss(share, gbs)

    block(step, read, LOG_EVERY, is_on=False)
    num_steps = max(LOG_EVERY, round(seconds / block(step, read, LOG_EVERY, is_on=False) / LOG_EVERY) * LOG_EVERY)
    print(f"{num_pairs} pairs of blocks of {num_steps} steps", file=sys.stderr)
    for _ in range(num_pairs):
        with_first = order.random() < 0.5
        block_s = {is_on: block(step, read, num_steps, is_on=is_on) for is_on in (with_first, not with_first)}
        yield Pair(with_s=block_s[True], without_s=block_s[False], with_first=with_first)


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
