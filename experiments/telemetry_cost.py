"""Measures the cost of sampling the GPU once a second: alternating blocks of steps with and without sampling.

    python experiments/telemetry_cost.py [--pairs N] [--seconds S] [--json FILE] \\
        task=pretrain_gpt3_126m cluster=local cluster.device=cuda cluster.ranks_per_node=1 gpu@cluster.gpu=h200 \\
        model.weights=random

One process holds the engine of one rank, as experiments/one_rank.py does, and keeps training. In a pair one
block runs with the sampler that `launch.telemetry=true` starts (jobs.ranks.telemetry), the other one without;
which of them comes first is random for each pair. The sampler starts and ends between blocks, and two steps before
each block are not timed. Two separate runs would differ by more than the limit, in memory and clocks.

Printed: the ratio of time per step, with and without, its 95 % interval (log ratios of pairs, Student's t), and whether
the cost is significantly below the limit. Exit code 1: it is not, or nothing was sampled. On a machine without a GPU
this tries out the script: PYTHONPATH=.:tests/helpers/fake_nvml FAKE_NVML='{"gpus": {"GPU-none": 0}}'.
"""

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from one_rank import composed, join, known_words, synchronize
from scipy import stats

from bench.contract import telemetry
from bench.contract.plan import Plan
from jobs.ranks.telemetry import NotMeasured, Sampler, uuids

LIMIT = 0.005
"""The largest cost that is accepted, as a share of a step."""
UNTIMED_STEPS = 2
START_S = 30


@dataclass(frozen=True)
class Pair:
    """Seconds per step of two adjacent blocks."""

    with_s: float
    without_s: float
    with_first: bool


Block = Callable[[bool], float]
"""Runs a block of steps, with what is measured or without, and returns the seconds per step."""


def main() -> int:
    return compared(__doc__, prepared, num_pairs=10)


def compared(about: str | None, prepare: Callable[[Plan, float], tuple[int, Block]], *, num_pairs: int) -> int:
    """Read the command line, run and print the pairs, and return the exit code.

    prepare: returns the number of steps of a block that takes so many seconds, and the block. num_pairs: the default.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for bench.launch")
    parser.add_argument("--pairs", type=int, default=num_pairs, help=f"number of pairs (default {num_pairs})")
    parser.add_argument("--seconds", type=float, default=3.0, help="minimum duration of a block (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the order within pairs")
    parser.add_argument("--json", type=Path, help="where to write the pairs")
    args = parser.parse_args()
    num_steps, block = prepare(composed(args.overrides), args.seconds)
    print(f"{args.pairs} pairs of blocks of {num_steps} steps", file=sys.stderr)
    pairs = list(measured(block, args.pairs, random.Random(args.seed)))
    if args.json:
        args.json.write_text(json.dumps([asdict(pair) for pair in pairs]))
    return 0 if reported(pairs) else 1


def measured(block: Block, num_pairs: int, order: random.Random) -> Iterator[Pair]:
    """Yield pairs of blocks."""
    for _ in range(num_pairs):
        with_first = order.random() < 0.5
        block_s = {is_on: block(is_on) for is_on in (with_first, not with_first)}
        yield Pair(with_s=block_s[True], without_s=block_s[False], with_first=with_first)


def prepared(plan: Plan, seconds: float) -> tuple[int, Block]:
    """Return a block that is as long as `seconds`, after a few steps that compile."""
    step = stepping(plan)
    for _ in range(3):
        step()
    synchronize()
    began = time.perf_counter()
    step()
    synchronize()
    num_steps = math.ceil(seconds / (time.perf_counter() - began))
    return num_steps, lambda is_on: block(step, num_steps, is_on=is_on)


def stepping(plan: Plan) -> Callable[[], None]:
    """Return what makes one step after the other."""
    join(plan, 0)
    from jobs.engines.megatron import loop, model

    engine, rows = model.build(plan, seed=1), known_words(plan, 0)
    indices, numbers = np.arange(plan.batch.global_batch_size), itertools.count(1)
    return lambda: loop.train_step(engine, rows, indices, step=min(next(numbers), plan.max_steps))


def block(step: Callable[[], None], num_steps: int, *, is_on: bool) -> float:
    """Return the seconds per step of one block."""
    with sampled(is_on):
        for _ in range(UNTIMED_STEPS):
            step()
        synchronize()
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        return (time.perf_counter() - began) / num_steps


@contextmanager
def sampled(is_on: bool) -> Iterator[None]:
    """Sample this process's GPU for as long as the block, or do nothing.

    Raises:
        SystemExit: the GPU cannot be sampled.
    """
    if not is_on:
        yield
        return
    gpus = uuids(1) if torch.cuda.is_available() else ["none"]
    with TemporaryDirectory() as folder:
        file = Path(folder, "gpus.csv")
        sampler = Sampler(file, gpus)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not (file.exists() and telemetry.newest(file)):
            time.sleep(0.01)
        yield
        try:
            sampler.end()
        except NotMeasured as reason:
            sys.exit(f"the GPU cannot be sampled: {reason}")


def reported(pairs: Sequence[Pair]) -> bool:
    """Print what the pairs say; return whether the cost is below the limit, by the upper end of its interval."""
    for pair in pairs:
        order = "with, without" if pair.with_first else "without, with"
        print(f"{1000 * pair.with_s:10.3f} ms with {1000 * pair.without_s:10.3f} ms without   ({order})")
    logs = np.log([pair.with_s / pair.without_s for pair in pairs])
    half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    ratio, low, high = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
    print(f"with / without: {ratio:.5f}, 95 % interval {low:.5f} to {high:.5f}, n = {len(logs)} pairs")
    is_below = bool(high < 1 + LIMIT)
    print(f"cost of a step below {LIMIT:.1%}: {'yes' if is_below else 'not shown'}")
    return is_below


if __name__ == "__main__":
    sys.exit(main())
