"""Regret of `runstop tune` on this machine's GPU: all settings that fit are measured, not only the first few.

    python experiments/tune_regret_gpu.py [--budget-s 240] task=pretrain_gpt3_126m recipe.global_batch_size=64
    python experiments/tune_regret_gpu.py task=lora_7b data=rows_350 precision=fp8

All settings run in this process on one GPU, one after another, with random weights and rows. The first block runs all
of them in random order; each later block runs those within 20 % of the fastest again, in reversed order, so that a
drift of the GPU is seen. The time of settings is the median of their steps; slow settings have fewer steps (--most-s),
but at least three. Regret is by which share the step of the chosen settings is longer than that of the fastest.
"""

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.cli import arguments
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError
from bench.planning import compose
from bench.planning.commands import CUDA_ENVIRONMENT, ENVIRONMENT
from bench.results.tuning import Candidate
from bench.tuning import Request, dry_run

os.environ.update(ENVIRONMENT | CUDA_ENVIRONMENT)  # as for the ranks of a run; torch reads it when it is imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from one_rank import join, known_words, require, synchronize  # noqa: E402

from jobs.ranks.timing import forget_memory, peaks_gib  # noqa: E402

CLOSE = 1.2
"""Later blocks repeat settings whose step is at most so many times that of the fastest."""
LEAST_STEPS = 3
BEST = Request(overrides=()).best
"""How many of the ranking `tune` measures."""


@dataclass
class Tried:
    """Settings and the steps that they took."""

    candidate: Candidate
    plan: TrainingPlan
    blocks_ms: list[list[float]] = field(default_factory=list)
    """The timed steps of each block; a block that did not run this setting has none of it."""
    peak_gib: float = float("nan")
    """Reserved by torch."""
    failure: str = ""

    @property
    def steps_ms(self) -> list[float]:
        return [step for block in self.blocks_ms for step in block]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.steps_ms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for runstop tune, without a cluster")
    parser.add_argument("--steps", type=arguments.count, default=8, help="timed steps of a block (default 8)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them (default 3)")
    parser.add_argument("--most-s", type=float, default=10, help="seconds of timed steps of a setting (default 10)")
    parser.add_argument("--blocks", type=arguments.count, default=2, help="the most blocks (default 2)")
    parser.add_argument("--budget-s", type=float, help="seconds after which no further setting starts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all steps there")
    args = parser.parse_args()
    began_s = time.monotonic()
    overrides = ["cluster=local", "cluster.ranks_per_node=1", "model.weights=random", *args.overrides]
    try:
        every = composed(overrides)
    except BenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    where = f"one {device}, torch {torch.__version__}"
    print(f"{' '.join(args.overrides)} on {where}: {len(every)} settings fit", flush=True)
    join(every[0].plan, 0)
    left = measure(
        every,
        run=lambda one: run(one.plan, steps=args.steps, warm_up=args.warm_up, most_s=args.most_s),
        num_blocks=args.blocks,
        is_over=lambda: args.budget_s is not None and time.monotonic() - began_s > args.budget_s,
    )
    print_table(every)
    for line in [*regrets(every), *not_measured(every, left)]:
        print(line)
    print(f"{time.monotonic() - began_s:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([saved(one) for one in every], indent=1) + "\n")
    return 0


def composed(overrides: Sequence[str]) -> list[Tried]:
    """Return the candidates of `tune` with their plans, in the order of the ranking.

    Raises:
        ConfigError: the overrides are wrong, no settings fit, or this machine cannot run them alone.
    """
    every = []
    for one in dry_run(Request(overrides=tuple(overrides))).tried:
        plan = compose.compose([*overrides, "launch.health=false", *one.candidate.overrides])
        require(plan, 0)
        assert isinstance(plan, TrainingPlan)
        every.append(Tried(one.candidate, plan))
    return every


def measure(
    every: Sequence[Tried],
    *,
    run: Callable[[Tried], tuple[list[float], float]],
    num_blocks: int,
    is_over: Callable[[], bool],
) -> dict[int, list[Tried]]:
    """Run the settings block by block; return by block those that did not run because the time was over."""
    order = random.Random(1).sample(every, len(every))
    for block in range(num_blocks):
        if block:
            fastest_ms = min((one.median_ms for one in every if one.steps_ms), default=0.0)
            order = [one for one in reversed(order) if one.steps_ms and one.median_ms <= CLOSE * fastest_ms]
        for place, one in enumerate(order):
            if is_over():
                return {block: order[place:]}
            began_s = time.monotonic()
            try:
                steps_ms, one.peak_gib = run(one)
                one.blocks_ms.append(steps_ms)
            except torch.OutOfMemoryError as error:
                one.failure = f"out of memory: {str(error).splitlines()[0]}"
            forget()  # outside of the handler: a traceback holds the tensors of its frames
            result = one.failure or f"{statistics.median(one.blocks_ms[-1]):.1f} ms"
            took = f"{time.monotonic() - began_s:.1f} s with building"
            print(f"block {block + 1}: {one.candidate.name}: {result}, {took}", file=sys.stderr, flush=True)
    return {}


def run(plan: TrainingPlan, *, steps: int, warm_up: int, most_s: float) -> tuple[list[float], float]:
    """Return the milliseconds of each timed step, and the peak of reserved memory in GiB."""
    from jobs.engines.megatron import loop, model

    forget_memory()
    engine, rows = model.build(plan, seed=1), known_words(plan, 0)
    indices, steps_ms = np.arange(plan.batch.global_batch_size), []
    for step in range(1, warm_up + steps + 1):
        synchronize()
        start_s = time.perf_counter()
        loop.train_step(engine, rows, indices, step)
        synchronize()
        steps_ms.append(1000 * (time.perf_counter() - start_s))
        timed = steps_ms[warm_up:]
        if len(timed) >= LEAST_STEPS and sum(timed) > 1000 * most_s:
            break
    peak_gib = peaks_gib()[1] if torch.cuda.is_available() else float("nan")
    return steps_ms[warm_up:], peak_gib


def forget() -> None:
    """Free the memory of the last engine."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def print_table(every: Sequence[Tried]) -> None:
    columns = ("rank", "settings", "predicted (ms)", "measured (ms)", "p10..p90", "n", "error", "medians of blocks")
    print("  ".join([*columns, "GiB reserved, estimated"]))
    for one in every:
        predicted, memory = one.candidate.step_ms, f"{one.peak_gib:.1f}, {one.candidate.memory_gib:.1f}"
        cells = [f"{one.candidate.rank}", one.candidate.name, f"{predicted:.1f}" if predicted else "-"]
        if one.steps_ms:
            low, high = np.percentile(one.steps_ms, (10, 90))
            error = f"{100 * (predicted / one.median_ms - 1):+.1f} %" if predicted else "-"
            blocks = " ".join(f"{statistics.median(block):.1f}" for block in one.blocks_ms)
            cells += [f"{one.median_ms:.1f}", f"{low:.1f}..{high:.1f}", f"{len(one.steps_ms)}", error, blocks, memory]
        else:
            cells += [one.failure or "not measured", "-, " + f"{one.candidate.memory_gib:.1f}"]
        print("  ".join(cells))


def regrets(every: Sequence[Tried]) -> list[str]:
    """Return the regret of the model's first, and of the best of its first few as measured: of all steps, by block."""
    lines = []
    for block in (None, *range(max(len(one.blocks_ms) for one in every))):
        name = "all blocks" if block is None else f"block {block + 1}"
        step_ms = {one.candidate.name: step for one in every if (step := step_of(one, block)) is not None}
        if not step_ms:
            continue
        best = min(step_ms, key=step_ms.__getitem__)
        lines.append(f"{name}: {len(step_ms)} of {len(every)} settings; the fastest: {best}, {step_ms[best]:.1f} ms")
        for count in (1, BEST):
            first = [one.candidate.name for one in every[:count] if one.candidate.name in step_ms]
            if not first:
                lines.append(f"  none of the first {count} of the ranking was measured")
                continue
            chosen = min(first, key=step_ms.__getitem__)
            regret = 100 * (step_ms[chosen] / step_ms[best] - 1)
            lines.append(f"  first {count} of the ranking: {chosen}, regret {regret:.2f} %")
    return lines


def step_of(one: Tried, block: int | None) -> float | None:
    """Return the median step of a block, or of all."""
    if block is None:
        return one.median_ms if one.steps_ms else None
    return statistics.median(one.blocks_ms[block]) if block < len(one.blocks_ms) else None


def not_measured(every: Sequence[Tried], left: dict[int, list[Tried]]) -> list[str]:
    """Return lines about what failed, and what the time did not suffice for."""
    lines = [f"FAILED although it should fit: {one.candidate.name}: {one.failure}" for one in every if one.failure]
    for block, rest in left.items():
        names = ", ".join(one.candidate.name for one in rest)
        lines.append(f"the time was over in block {block + 1}; not run there: {names}")
    return lines


def saved(one: Tried) -> dict[str, object]:
    return {
        "rank": one.candidate.rank,
        "name": one.candidate.name,
        "overrides": one.candidate.overrides,
        "predicted_ms": one.candidate.step_ms,
        "memory_gib": one.candidate.memory_gib,
        "peak_gib": one.peak_gib,
        "blocks_ms": one.blocks_ms,
        "failure": one.failure,
    }


if __name__ == "__main__":
    sys.exit(main())
