"""Trains layouts of this machine's GPUs, their kernels launched by the host and by one CUDA graph with collectives.

    python experiments/captured_layouts.py --layouts parallel.tp=4 parallel.cp=4 --layers 4 12 -- \\
        task=lora70b cluster=local model.weights=random precision=fp8 data.seq_length=4096 recipe.global_batch_size=1

All layouts train one after the other in the same processes, one per GPU. Printed for each:

- step and host: milliseconds until the GPUs have finished a step, and until the host has launched it. Each step starts
  when all GPUs are idle, so that the host does not wait for a full queue of launches.
- wait: the slowest rank's host time beyond the mean over ranks.
- GPU busy: time in which kernels of rank 0 run in one profiled step, without those of NCCL; NCCL: time in which only
  NCCL's run; idle: the rest of the median step.
- kernels, and collectives with the host's microseconds for each of them (in separate steps), counted on rank 0. Only
  the collectives of runstop's own code are timed.
- the differences of the losses from those of the host's launches, each fifth step; `repeat` has those of two equal
  runs.

With two numbers of layers, the last lines have the host's time of one layer: their difference. On CPUs nothing is
captured.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from one_rank import composed, synchronize
from torch import multiprocessing

from bench.backends.local import free_port
from bench.contract.plan_kinds import TrainingPlan

UNTIMED_STEPS = 3
COUNTED_STEPS = 3
ROWS = 16
"""Batches of different rows, over which the steps go round."""
COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Of one step on rank 0: counts, and milliseconds in which at least one kernel runs."""

    count: int
    nccl_count: int
    memory_count: int
    """Copies and memsets, which the host launches like kernels."""
    busy_ms: float
    """Without NCCL's kernels."""
    nccl_ms: float
    """Only NCCL's kernels run."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Of one layout and one way to launch, on rank 0."""

    losses: list[float]
    step_ms: list[float]
    host_ms: list[float]
    wait_ms: float
    peak_gib: float
    collectives: int = 0
    """Calls in a step."""
    collective_us: float = 0.0
    """The host's time of a call and of its wait, as a mean."""
    kernels: Kernels | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="KEY=VALUE", help="as for bench.launch")
    parser.add_argument("--layouts", nargs="+", required=True, metavar="KEY=VALUE,…", help="overrides of each layout")
    parser.add_argument("--layers", nargs="+", type=int, required=True, help="numbers of layers, one or two")
    parser.add_argument("--steps", type=int, default=10, help="steps to time (default 10)")
    parser.add_argument("--repeat", action="store_true", help="launch by the host twice, to compare its losses")
    args = parser.parse_args()
    plans = [
        [composed([*args.overrides, *layout.split(","), f"model.num_layers={count}"]) for count in args.layers]
        for layout in args.layouts
    ]
    sizes = {plan.world.num_ranks for of_layout in plans for plan in of_layout}
    if len(sizes) > 1:
        parser.error(f"the layouts have {sorted(sizes)} ranks: give all of them the same number")
    os.environ.update(plans[0][0].environment)
    size = sizes.pop()
    ports = [free_port() for _ in plans]
    multiprocessing.spawn(run, args=(size, ports, plans, args.steps, args.repeat), nprocs=size)
    return 0


def run(
    rank: int, size: int, ports: Sequence[int], plans: Sequence[Sequence[TrainingPlan]], steps: int, repeat: bool
) -> None:
    """Measure all layouts as one of the ranks; rank 0 prints."""
    import warnings

    from jobs.engines import megatron
    from jobs.ranks.identity import Rank

    warnings.simplefilter("ignore")  # megatron-core's
    for port, of_layout in zip(ports, plans, strict=True):
        megatron.start_ranks(of_layout[0], Rank(rank, rank, size, "127.0.0.1", port))
        host_ms = {}
        for plan in of_layout:
            eager = measured(replace(plan, cuda_graph=False), steps)
            results = {"host": eager}
            if torch.cuda.is_available():
                results["graph"] = measured(replace(plan, cuda_graph=True), steps)
            if repeat:
                results["repeat"] = measured(replace(plan, cuda_graph=False), steps)
            if rank == 0:
                show(plan, results)
            host_ms[plan.config.model.num_layers] = eager
        if rank == 0 and len(host_ms) == 2:
            show_layer(host_ms)
        megatron.end_ranks()


def measured(plan: TrainingPlan, steps: int) -> Result:
    """Return what training the plan's model takes; all ranks call this together."""
    from jobs.data import rows as rows_of
    from jobs.engines.megatron import loop, model

    gc.collect()  # the engine before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine, size = model.build(plan, seed=1), plan.batch.global_batch_size
    shape = (ROWS * size, plan.config.training_data.seq_length)
    tokens, counts, _ = rows_of.rows(*shape, vocab_size=plan.config.model.vocab_size, seed=1)
    rows = rows_of.Rows(tokens, counts)
    model.seed_all(2)
    number = iter(range(1, 10**9))

    def step() -> Any:
        at = next(number)
        return loop.train_step(engine, rows, np.arange(size) + at % ROWS * size, at)

    shares, host_ms, step_ms = [], [], []
    for _ in range(UNTIMED_STEPS + steps):
        torch.distributed.barrier()
        synchronize()
        start_s = time.perf_counter()
        share = step()
        host_ms.append(1e3 * (time.perf_counter() - start_s))
        synchronize()
        step_ms.append(1e3 * (time.perf_counter() - start_s))
        shares.append(share)
    losses = [loop.mean_loss(share, size) for share in shares]
    host_ms, step_ms = host_ms[UNTIMED_STEPS:], step_ms[UNTIMED_STEPS:]
    peak_gib = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else float("nan")
    calls, seconds = counted(step)
    kernels = profiled(step) if torch.cuda.is_available() else None
    return Result(
        losses=losses,
        step_ms=step_ms,
        host_ms=host_ms,
        wait_ms=spread_ms(statistics.median(host_ms)),
        peak_gib=peak_gib,
        collectives=calls,
        collective_us=1e6 * seconds / calls if calls else 0.0,
        kernels=kernels,
    )


def spread_ms(own_ms: float) -> float:
    """Return by how much the slowest rank's number is above the mean."""
    of_all: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, own_ms)
    return max(of_all) - statistics.fmean(of_all)


def counted(step: Callable[[], Any]) -> tuple[int, float]:
    """Return the collectives of a step, and the host's seconds in them; a captured step calls those of no layer."""
    timer = Timer()
    for _ in range(COUNTED_STEPS):
        torch.distributed.barrier()
        synchronize()
        with timed_collectives(timer):
            step()
    synchronize()
    return timer.calls // COUNTED_STEPS, timer.seconds / COUNTED_STEPS


@dataclass
class Timer:
    """The host's time in calls."""

    calls: int = 0
    seconds: float = 0.0

    def timed(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start_s = time.perf_counter()
        result = call(*args, **options)
        self.seconds += time.perf_counter() - start_s
        return result


@contextmanager
def timed_collectives(timer: Timer) -> Iterator[None]:
    """Time the collectives of torch.distributed, and the waits for their results."""
    originals = {name: getattr(torch.distributed, name) for name in COLLECTIVES}

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            timer.calls += 1
            work = timer.timed(original, *args, **options)
            return work and Waiting(work, timer)

        return call

    for name, original in originals.items():
        setattr(torch.distributed, name, wrapped(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)


@dataclass
class Waiting:
    """An asynchronous collective whose wait is timed."""

    work: Any
    timer: Timer

    def wait(self) -> None:
        self.timer.timed(self.work.wait)


def profiled(step: Callable[[], Any]) -> Kernels | None:
    """Return the kernels of one step on rank 0; all ranks train it."""
    from torch.profiler import ProfilerActivity

    torch.distributed.barrier()
    synchronize()
    if torch.distributed.get_rank() != 0:
        step()
        synchronize()
        return None
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize()
    own, nccl, memory_count = [], [], 0
    for event in profiler.events():
        memory_count += event.name.startswith(("Memcpy", "Memset"))
        is_kernel = event.device_type == torch.autograd.DeviceType.CUDA
        if not is_kernel or event.name.startswith(("Mem", "Event", "Stream", "Context")):
            continue
        is_nccl = event.name.startswith("nccl")
        (nccl if is_nccl else own).append((event.time_range.start, event.time_range.end))
    busy_ms = covered(own) / 1e3
    return Kernels(
        count=len(own),
        nccl_count=len(nccl),
        memory_count=memory_count,
        busy_ms=busy_ms,
        nccl_ms=covered([*own, *nccl]) / 1e3 - busy_ms,
    )


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> covered([(5, 6), (0, 2), (1, 3)])
    4.0
    """
    length, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length


def show(plan: TrainingPlan, results: dict[str, Result]) -> None:
    w = plan.world
    print(
        f"dp {w.dp} tp {w.tp} cp {w.cp} sp {w.sp}: {plan.config.model.num_layers} layers of {plan.config.model.name}, "
        f"{plan.batch.gradient_accumulation_steps} micro-batches of {plan.batch.micro_batch_size} x "
        f"{plan.config.training_data.seq_length} tokens; the plan {'has' if plan.cuda_graph else 'has no'} graph"
    )
    expected = results["host"].losses
    for name, one in results.items():
        step, host = statistics.median(one.step_ms), statistics.median(one.host_ms)
        low, high = np.percentile(one.step_ms, [10, 90])
        text = f"  {name:5} step {step:.2f} ms (p10 {low:.2f}, p90 {high:.2f}, n = {len(one.step_ms)})"
        text += f", host {host:.2f} (p10 {_p10(one.host_ms):.2f}), wait {one.wait_ms:.2f}, peak {one.peak_gib:.2f} GiB"
        print(text)
        if (k := one.kernels) is not None:
            idle = step - k.busy_ms - k.nccl_ms
            print(
                f"        GPU busy {k.busy_ms:.2f} ms, NCCL {k.nccl_ms:.2f}, idle {idle:.2f} ({idle / step:.0%}); "
                f"{k.count} kernels, {k.memory_count} copies and memsets, {k.nccl_count} of NCCL"
            )
        differences = [abs(a - b) for a, b in zip(expected, one.losses, strict=True)]
        num_equal = next((step for step, difference in enumerate(differences) if difference), len(differences))
        print(
            f"        {one.collectives} collectives called, {one.collective_us:.1f} us each; the first {num_equal} of "
            f"{len(differences)} losses are equal; differences {_few(differences)}; last loss {one.losses[-1]:.6f}"
        )
    sys.stdout.flush()


def _few(differences: Sequence[float]) -> str:
    return " ".join(f"{difference:.1e}" for difference in [*differences[:5], *differences[5::5]])


def show_layer(by_layers: dict[int, Result]) -> None:
    """Print what a layer and micro-batch takes the host, from two numbers of layers: by medians, and by p10."""
    (few, one), (many, other) = sorted(by_layers.items())
    layers = many - few
    us, low_us = (1e3 * (at(other.host_ms) - at(one.host_ms)) / layers for at in (statistics.median, _p10))
    calls = (other.collectives - one.collectives) / layers
    call_us = (other.collectives * other.collective_us - one.collectives * one.collective_us) / layers
    print(
        f"  host of a layer (all micro-batches): {us:.0f} us (by p10 {low_us:.0f}), "
        f"{call_us:.0f} of them in {calls:.1f} collectives",
        flush=True,
    )


def _p10(values: Sequence[float]) -> float:
    return float(np.percentile(values, 10))


if __name__ == "__main__":
    sys.exit(main())
