"""Trains a mixture of experts on this machine's GPU with both of megatron-core's dispatchers, and compares them.

    python experiments/experts.py [--steps N] [--only DISPATCHER] KEY=VALUE …

The keys are those of bench.launch; the plan must have one rank and random weights. Both start from the same weights and
train on the same rows. Printed are the losses, their largest difference, the median step time and the peak memory. On
a CPU only the all-gather dispatcher can be built.
"""

import argparse
import statistics
import sys
import time
import warnings

import numpy as np
import torch

from bench.backends.local import free_port
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError, ConfigError
from bench.planning import compose
from jobs.ranks.identity import Rank
from jobs.ranks.timing import forget_memory, peaks_gib

DISPATCHERS = ("allgather", "alltoall")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for bench.launch")
    parser.add_argument("--steps", type=int, default=10, help="steps to time, after two that are not (default 10)")
    parser.add_argument("--only", choices=DISPATCHERS, help="train with one dispatcher (default: both)")
    args = parser.parse_args()
    try:
        plan = compose.compose(args.overrides)
        require(plan)
    except BenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    assert isinstance(plan, TrainingPlan)
    warnings.simplefilter("ignore")  # megatron-core's: what is not installed, and old names of torch
    from jobs.engines.megatron import groups

    groups.start_ranks(plan, Rank(0, 0, 1, "127.0.0.1", free_port()))
    losses = {name: measure(plan, name, args.steps) for name in ([args.only] if args.only else DISPATCHERS)}
    first, *others = losses.values()
    if others:
        print(f"largest difference of losses: {np.abs(np.subtract(first, others[0])).max():.2e}")
    groups.end_ranks()
    return 0


def require(plan: object) -> None:
    """Refuse a plan without experts, with several ranks, or with weights that must be loaded."""
    fix = "give task=pretrain_8b model=mixtral_8x7b model.num_layers=2 model.weights=random cluster.ranks_per_node=1"
    is_training = isinstance(plan, TrainingPlan) and plan.config.model.experts is not None
    if not is_training or plan.world.num_ranks != 1 or plan.base_dir is not None or plan.data_dir is not None:
        raise ConfigError("the plan must train experts from random weights on one rank", where="KEY=VALUE", fix=fix)


def measure(plan: TrainingPlan, dispatcher: str, steps: int) -> list[float]:
    """Train with a dispatcher, print its step time and memory, and return the losses of all steps."""
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import loop, model

    model.dispatcher = lambda: dispatcher
    engine = model.build(plan, seed=1)
    rows = rows_of.synthetic(plan)
    indices, times_s, losses = np.arange(plan.batch.global_batch_size), [], []
    for step in range(1, steps + 3):
        synchronize()
        start = time.perf_counter()
        loss = loop.mean_loss(loop.train_step(engine, rows, indices, step), len(indices))
        synchronize()
        if step == 2:
            forget_memory()
        if step > 2:
            times_s.append(time.perf_counter() - start)
        losses.append(loss)
    tokens = plan.batch.tokens_per_step / statistics.median(times_s)
    line = f"{dispatcher}: step {statistics.median(times_s):.4f} s (median, n = {steps}), {tokens:,.0f} tokens/s"
    if torch.cuda.is_available():
        line += f", {tokens / plan.config.training_data.seq_length * plan.tflop_per_sample:,.0f} TFLOP/s"
        line += f", peak {peaks_gib()[0]:.2f} GiB allocated"
    print(f"{line}; estimated {plan.memory.total_gib:.2f} GiB; losses {losses[0]:.5f} … {losses[-1]:.5f}", flush=True)
    del engine
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return losses


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
