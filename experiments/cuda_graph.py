"""Trains a plan on one GPU twice, its kernels launched by the host and by one CUDA graph: times, and the same losses.

    python experiments/cuda_graph.py [--steps N] \\
        task=lora_7b data=rows_350 recipe.micro_batch_size=1 model.weights=random cluster=dgxh200 \\
        cluster.ranks_per_node=1

The host's time is until it has launched the step; the step's time is until the GPU has finished it. The model starts
from the same weights, and dropout from the same seeds.
"""

import argparse
import gc
import statistics
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from one_rank import composed, join, known_words, synchronize

from bench.contract.plan import Plan


@dataclass(frozen=True)
class Result:
    """Of the timed steps."""

    host_ms: float
    step_ms: float
    losses: list[float]
    weights: torch.Tensor
    peak_gib: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for bench.launch")
    parser.add_argument("--steps", type=int, default=10, help="steps to time, after two that are not (default 10)")
    args = parser.parse_args()
    plan = composed(args.overrides)
    join(plan, 0)
    host, graph = (trained(replace(plan, cuda_graph=flag), args.steps) for flag in (False, True))
    print(f"the plan {'has' if plan.cuda_graph else 'does not have'} a graph; micro-batches a step:", end=" ")
    print(plan.batch.gradient_accumulation_steps)
    for name, result in (("host", host), ("graph", graph)):
        print(f"{name:6} host {result.host_ms:9.2f} ms, step {result.step_ms:9.2f} ms, peak {result.peak_gib:.2f} GiB")
    print(f"host / graph: {host.step_ms / graph.step_ms:.2f}")
    print("losses differ by at most", max(abs(a - b) for a, b in zip(host.losses, graph.losses, strict=True)))
    print("weights differ by at most", (host.weights - graph.weights).abs().max().item())
    return 0


def trained(plan: Plan, steps: int) -> Result:
    """Return what training the plan's model took, and what came of it."""
    from jobs.engines.megatron import loop, model

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    engine, rows = model.build(plan, seed=1), known_words(plan, 0)
    model.seed_all(2)
    indices, host_s, step_s, shares = np.arange(plan.batch.global_batch_size), [], [], []
    for step in range(1, steps + 3):
        synchronize()
        start_s = time.perf_counter()
        shares.append(loop.train_step(engine, rows, indices, step))
        host_s.append(time.perf_counter() - start_s)
        synchronize()
        step_s.append(time.perf_counter() - start_s)
    weights = torch.cat([shard.master.cpu() for shard in engine.optimizer.shards])
    peak_gib = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else float("nan")
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    medians_ms = (statistics.median(times_s[2:]) * 1e3 for times_s in (host_s, step_s))
    return Result(*medians_ms, [share.item() for share in shares], weights, peak_gib)


if __name__ == "__main__":
    sys.exit(main())
