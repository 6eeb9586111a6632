"""Times a step of data parallel training with its communication overlapped and not, in one process per GPU.

    torchrun --nproc-per-node 2 experiments/data_parallel.py [--alone] [--steps N] [--profile] \\
        task=pretrain_7b cluster=local cluster.device=cuda gpu@cluster.gpu=h200 model.weights=random \\
        recipe.global_batch_size=32

The engine trains on random rows: half of the plain steps, all overlapped ones, the other half. One step before each of
these blocks is not timed. Step times are by the GPU's clock, without a wait of the host between steps. A rank's own
time is without what it waits for others (jobs.ranks.rank_times). Then the collectives of a step are timed alone. With
--profile, kernels of two overlapped steps of rank 0 are recorded, too. With --alone each process trains on its GPU
without the others, at the same time, with its part of the global batch. This tells the slowest GPU.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from bench.contract.plan import Plan
from bench.contract.schema import Device
from bench.planning import compose

ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for bench.launch, of all GPUs together")
    parser.add_argument("--alone", action="store_true", help="each GPU for itself")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a schedule (default 8)")
    parser.add_argument("--profile", action="store_true", help="record kernels of rank 0")
    args = parser.parse_args()
    world = int(os.environ["WORLD_SIZE"])
    plan = composed(args.overrides, 1 if args.alone else world)
    who = joined(plan, alone=args.alone)
    measured = alone(plan, args.steps) if args.alone else together(plan, args.steps, profile=args.profile)
    print(json.dumps({"gpu": who.local_rank, **shown(measured, plan)}), flush=True)
    from jobs.engines.megatron.groups import end_ranks

    end_ranks()
    return 0


def composed(overrides: list[str], num_ranks: int) -> Plan:
    """Return the plan of so many ranks, with its environment set: torch is imported after this."""
    world = int(os.environ["WORLD_SIZE"])
    plan = compose.compose([*overrides, f"cluster.ranks_per_node={num_ranks}"])
    if num_ranks < world:  # a part of the global batch
        batch = plan.batch.global_batch_size // world
        plan = compose.compose([*overrides, f"cluster.ranks_per_node={num_ranks}", f"recipe.global_batch_size={batch}"])
    os.environ.update(plan.environment)
    return plan


def joined(plan: Plan, *, alone: bool) -> Any:
    from jobs.engines.megatron.groups import start_ranks
    from jobs.ranks.identity import from_environment

    who = from_environment()
    if alone:  # a plan of one rank uses the first GPU that it sees
        if plan.config.cluster.device is Device.cuda:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(who.local_rank)
        who = replace(who, rank=0, world_size=1, master_port=who.master_port + 1 + who.local_rank)
        for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
    start_ranks(plan, who)
    return who


def alone(plan: Any, steps: int) -> dict[str, list[float]]:
    """Return the milliseconds of the steps of one GPU."""
    train, _ = stepping(plan)
    times_ms, _ = train(1 + steps)
    return {"alone": times_ms[1:]}


def together(plan: Any, steps: int, *, profile: bool) -> dict[str, Any]:
    """Return the milliseconds of the steps of both schedules, and what else is measured."""
    train, engine = stepping(plan)
    measured: dict[str, Any] = {}
    for overlaps, number in ((False, steps // 2), (True, steps), (False, steps - steps // 2)):
        set_schedule(engine, overlaps)
        times_ms, own_ms = train(1 + number)
        name = "overlapped" if overlaps else "plain"
        measured.setdefault(name, []).extend(times_ms[1:])
        measured.setdefault(f"own {name}", []).extend(own_ms[1:])
    if profile:
        set_schedule(engine, True)
        train(1)
        measured |= profiled(lambda: train(2))
    set_schedule(engine, False)
    return measured | collectives_ms(engine)


def stepping(plan: Any) -> tuple[Callable[[int], tuple[list[float], list[float]]], Any]:
    """Return what trains some steps and returns their times and own times in ms, and the engine."""
    import numpy as np
    import torch
    from one_rank import known_words, synchronize

    from jobs.engines.megatron import loop, model
    from jobs.ranks import rank_times
    from jobs.ranks.timing import now, seconds

    engine, rows = model.build(plan, seed=1), known_words(plan, 0)
    indices = np.arange(plan.batch.global_batch_size)

    def train(steps: int) -> tuple[list[float], list[float]]:
        synchronize()
        torch.distributed.barrier()
        ends, waits = [now()], []
        for _ in range(steps):
            rank_times._marks.clear()
            rank_times._marks.is_on = True
            loop.update(engine, rows, indices, 1e-5)
            ends.append(now())
            waits.append(rank_times._marks.waits)
        synchronize()
        times_ms = [1e3 * seconds(*ends_of_two) for ends_of_two in pairwise(ends)]
        waits_ms = [sum(1e3 * seconds(*wait) for wait in of_step) for of_step in waits]
        return times_ms, [time - wait for time, wait in zip(times_ms, waits_ms, strict=True)]

    return train, engine


def set_schedule(engine: Any, overlaps: bool) -> None:
    """Let the engine overlap from the next step on, or not, as `parallel.overlap` does when it is built."""
    ddp = engine.chunks[0].ddp_config
    engine.updated_weights.wait()
    engine.refresh_weights()
    ddp.overlap_grad_reduce, ddp.overlap_param_gather = overlaps, overlaps and ddp.use_distributed_optimizer
    engine.updated_weights.arrive_late = ddp.overlap_param_gather


def profiled(step: Callable[[], Any]) -> dict[str, float]:
    """Return what NCCL took in two steps of rank 0, and how much of it overlapped with other kernels, in ms."""
    import torch

    if torch.distributed.get_rank() or not torch.cuda.is_available():
        step()
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name:
            spans["nccl" in event.name].append((event.time_range.start, event.time_range.end))
    nccl, other = (_union(spans[is_nccl]) for is_nccl in (True, False))
    both = _union([*nccl, *other])
    of_nccl, of_other, of_both = (sum(end - start for start, end in one) / 1e3 for one in (nccl, other, both))
    shown = {"nccl": of_nccl, "nccl overlapped": of_nccl + of_other - of_both, "other kernels": of_other}
    return {f"profile: {name}": value for name, value in shown.items()} | {"profile: nccl kernels": len(spans[True])}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the spans in order, those that touch as one."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def collectives_ms(engine: Any) -> dict[str, float]:
    """Return the ms of a step's collectives alone: all buckets, one after the other."""
    import torch
    from one_rank import synchronize

    from jobs.ranks.timing import now, seconds

    def timed(run: Callable[[Any], object]) -> float:
        times = []
        for _ in range(ROUNDS):
            synchronize()
            torch.distributed.barrier()
            start = now()
            for chunk in engine.chunks:
                run(chunk)
            end = now()
            synchronize()
            times.append(1e3 * seconds(start, end))
        return statistics.median(times)

    return {
        "reduce alone": timed(lambda chunk: chunk.finish_grad_sync()),
        "gather alone": timed(lambda chunk: chunk.start_param_sync()),
    }


def shown(measured: dict[str, Any], plan: Any) -> dict[str, Any]:
    """Return the medians, the lowest and highest times, and the tokens per second of a GPU."""
    tokens = plan.batch.global_batch_size * plan.config.training_data.seq_length / plan.world.num_ranks
    table: dict[str, Any] = {}
    for name, value in measured.items():
        if not isinstance(value, list):
            table[name] = round(value, 2)
            continue
        median, low, high = statistics.median(value), min(value), max(value)
        table[name] = (
            f"{median:.1f} ms ({low:.1f}..{high:.1f}, n = {len(value)}), {1e3 * tokens / median:,.0f} tokens/s"
        )
    import torch

    if torch.cuda.is_available():
        table["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return table


if __name__ == "__main__":
    sys.exit(main())
