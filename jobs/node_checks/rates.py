"""Measure all-reduce among ranks, GEMMs and memory copies of one rank, and clock offsets.

Times are medians of back-to-back calls after a warm-up (`jobs.kernels.timing.time_back_to_back`).
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed

from bench.contract.node_facts import AllReduceRate
from jobs.kernels import timing

MEETING_S = 120
"""Longest wait for another rank, at the start and in every collective."""
SWEEP_S = 8.0
"""Time limit for all message sizes; larger messages are skipped, so that a slow network does not delay the job."""
REPEAT_S, MIN_REPEATS, MAX_REPEATS = 0.5, 3, 20
SAMPLE_S = 0.02
"""Least time of a sample of an exchange; shorter ones are noisy."""
CLOCK_ROUNDS = 20
Readings = list[tuple[int, int]]
"""Times of one clock, in ns, before and after each barrier."""


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, by rank."""
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, value)
    return everyone


def slowest(seconds: float, device: torch.device, group: distributed.ProcessGroup | None = None) -> float:
    """Return the largest number of the group on all its ranks; also a barrier."""
    number = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(number, distributed.ReduceOp.MAX, group=group)
    return float(number.item())


def allreduce(
    sizes_mib: Sequence[int], device: torch.device, ranks: list[int] | None = None
) -> tuple[AllReduceRate, ...]:
    """Return time and bus bandwidth by message size among these ranks (None: all), for as many sizes as SWEEP_S allows.

    Bus bandwidth is 2 (n - 1) / n * bytes / seconds of the slowest rank, as NVIDIA's nccl-tests define it. Messages are
    BF16 on GPUs and FP32 on CPUs. A single rank has no bus bandwidth.
    """
    num_ranks = distributed.get_world_size() if ranks is None else len(ranks)
    if num_ranks == 1:
        return ()
    group = _group(ranks)
    slowest(0.0, device, group)  # the first message opens the connections
    rates: list[AllReduceRate] = []
    began, needed_s = time.perf_counter(), 0.0
    for mib in sizes_mib:
        spent_s = slowest(time.perf_counter() - began, device, group)
        if rates and spent_s + needed_s > SWEEP_S:
            break
        call = functools.partial(distributed.all_reduce, _message(mib, device), group=group)
        seconds = _median_s(call, device, lambda own: slowest(own, device, group))
        busbw = 2 * (num_ranks - 1) / num_ranks * mib * 2**20 / seconds
        rates.append(AllReduceRate(mib, ms=round(seconds * 1e3, 3), busbw_gbs=round(busbw / 1e9, 3)))
        needed_s = 2 * seconds * (MIN_REPEATS + 2)
    if group is not None:
        distributed.destroy_process_group(group)
    return tuple(rates)


class OwnCall(NamedTuple):
    """A call that one rank makes alone, and the floating-point operations or bytes of it."""

    call: Callable[[], object]
    amount: int


def own_calls(device: torch.device) -> dict[str, OwnCall]:
    """Return the calls of a GEMM (BF16 on a GPU, FP32 on a CPU) and of a memory copy: 20 in a row on a GPU."""
    gpu = device.type == "cuda"
    edge, copied, calls = (8192, 2**30, 20) if gpu else (1024, 2**26, 1)
    a, b = (torch.randn(edge, edge, dtype=torch.bfloat16 if gpu else torch.float32, device=device) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.randint(256, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        "GEMM": OwnCall(lambda: [torch.mm(a, b, out=out) for _ in range(calls)], 2 * edge**3 * calls),
        "copy": OwnCall(lambda: [target.copy_(source) for _ in range(calls)], 2 * copied * calls),
    }


def own_rates(device: torch.device) -> tuple[float, float]:
    """Return this rank's TFLOP/s of a GEMM and GB/s of a memory copy. All ranks measure at the same time."""
    per_s = {}
    for name, (call, amount) in own_calls(device).items():
        slowest(0.0, device)
        per_s[name] = amount / _median_s(call, device)
    return round(per_s["GEMM"] / 1e12, 4), round(per_s["copy"] / 1e9, 3)


def sampled(call: Callable[[], object], num: int, device: torch.device) -> list[float]:
    """Return the seconds of `num` back-to-back calls, after a warm-up."""
    timing.time_back_to_back(call, 2, device)
    return timing.time_back_to_back(call, num, device)


def exchange(to: int | None, source: int | None, mib: int, num: int, device: torch.device) -> list[float]:
    """Return `num` samples of the seconds in which this rank sends a message and receives another one.

    to, source: ranks; with None, this rank only waits for the others. All ranks call this together. A sample is the
    mean of as many messages as take SAMPLE_S. With two ranks, bytes / seconds is the bus bandwidth of their all-reduce.
    """
    out = _message(mib, device)
    received = torch.empty_like(out)

    def call(times: int = 1) -> None:
        for _ in range(times):
            ops = [
                distributed.P2POp(distributed.isend, out, to),
                distributed.P2POp(distributed.irecv, received, source),
            ]
            for work in distributed.batch_isend_irecv(ops):
                work.wait()

    slowest(0.0, device)
    alone = to is None or source is None
    expected_s = slowest(0.0 if alone else timing.time_back_to_back(call, 2, device)[1], device)
    times = max(1, min(MAX_REPEATS, int(SAMPLE_S / expected_s)))
    return [] if alone else [s / times for s in sampled(functools.partial(call, times), num, device)]


def clock_readings(device: torch.device) -> Readings:
    """Return this node's clock before and after each of CLOCK_ROUNDS barriers of all ranks."""
    readings = []
    for _ in range(CLOCK_ROUNDS):
        before = time.time_ns()
        slowest(0.0, device)
        readings.append((before, time.time_ns()))
    return readings


def clock_bounds_ms(own: Readings, other: Readings) -> tuple[float, float]:
    """Return the bounds between which the `own` clock is ahead of the `other`, in ms.

    On each clock, the last rank reaches a barrier between that clock's two readings.
    """
    low = max(mine[0] - theirs[1] for mine, theirs in zip(own, other, strict=True))
    high = min(mine[1] - theirs[0] for mine, theirs in zip(own, other, strict=True))
    return round(low / 1e6, 3), round(high / 1e6, 3)


def _group(ranks: list[int] | None) -> distributed.ProcessGroup | None:
    """Return a process group of these ranks; only they call this."""
    if ranks is None:
        return None
    limit = timedelta(seconds=MEETING_S)
    group: distributed.ProcessGroup = distributed.new_group(ranks, timeout=limit, use_local_synchronization=True)
    return group


def _message(mib: int, device: torch.device) -> torch.Tensor:
    """Return random numbers: BF16 on a GPU, FP32 on a CPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(mib * 2**20 // dtype.itemsize, dtype=dtype, device=device)


def _median_s(call: Callable[[], object], device: torch.device, agree: Callable[[float], float] = float) -> float:
    """Return the median seconds of a call; `agree` makes time and repeats equal on all ranks of a group."""
    timing.time_back_to_back(call, 1, device)
    expected_s = agree(timing.time_back_to_back(call, 1, device)[0])
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(REPEAT_S / expected_s)))
    return agree(statistics.median(timing.time_back_to_back(call, repeats, device)))
