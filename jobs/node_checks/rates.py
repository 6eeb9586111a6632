"""How fast: all-reduce among ranks, matrix products and memory copies of one rank, and how far apart clocks are.

Times are medians after a warm-up. On a GPU they lie between events on its stream, with no wait for the device in between.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import distributed

MEETING_S = 120
"""Longest wait for another rank, at the start and in every collective."""
SWEEP_S = 8.0
"""No larger message is tried when all sizes together would take longer: a slow network must not hold the job."""
REPEAT_S, MIN_REPEATS, MAX_REPEATS = 0.5, 3, 20
PAIR_ROUNDS = 4
"""So many partners each node has when the slow one is looked for."""
CLOCK_ROUNDS = 20
Readings = list[tuple[int, int]]
Rows = list[dict[str, Any]]


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, by rank."""
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, value)
    return everyone


def slowest(seconds: float, device: torch.device, group: distributed.ProcessGroup | None = None) -> float:
    """Return the largest of the group's numbers, on all of it; returns when everybody has come."""
    number = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(number, distributed.ReduceOp.MAX, group=group)
    return float(number.item())


def allreduce(sizes: Sequence[int], device: torch.device, ranks: list[int] | None = None) -> Rows:
    """Return milliseconds and bus bandwidth by message size (MiB) among these ranks (None: all), as far as SWEEP_S allows.

    Bus bandwidth is 2 (n - 1) / n * bytes / seconds of the slowest rank, as NVIDIA's nccl-tests define it; BF16 on GPUs,
    FP32 on CPUs. A single rank has none.
    """
    num_ranks = distributed.get_world_size() if ranks is None else len(ranks)
    if num_ranks == 1:
        return []
    group = _group(ranks)
    slowest(0.0, device, group)  # the first message makes the connections
    rows: Rows = []
    began, needed_s = time.perf_counter(), 0.0
    for mib in sizes:
        spent_s = slowest(time.perf_counter() - began, device, group)
        if rows and spent_s + needed_s > SWEEP_S:
            break
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        message = torch.randn(mib * 2**20 // dtype.itemsize, dtype=dtype, device=device)
        call = functools.partial(distributed.all_reduce, message, group=group)
        seconds = _median_s(call, device, lambda own: slowest(own, device, group))
        busbw = 2 * (num_ranks - 1) / num_ranks * mib * 2**20 / seconds
        rows.append({"mib": mib, "ms": round(seconds * 1e3, 3), "busbw_gbs": round(busbw / 1e9, 3)})
        needed_s = 2 * seconds * (MIN_REPEATS + 2)
    if group is not None:
        distributed.destroy_process_group(group)
    return rows


def own_rates(device: torch.device) -> dict[str, float]:
    """Return this rank's matrix products (BF16 on a GPU, FP32 on a CPU) and memory copies, all ranks at the same time."""
    gpu = device.type == "cuda"
    edge, copied, calls = (8192, 2**30, 20) if gpu else (1024, 2**26, 1)
    a, b = (torch.randn(edge, edge, dtype=torch.bfloat16 if gpu else torch.float32, device=device) for _ in range(2))
    product = torch.empty_like(a)
    slowest(0.0, device)
    gemm_s = _median_s(lambda: [torch.mm(a, b, out=product) for _ in range(calls)], device) / calls
    source = torch.randint(256, (copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    slowest(0.0, device)
    copy_s = _median_s(lambda: [target.copy_(source) for _ in range(calls)], device) / calls
    return {"gemm_tflops": round(2 * edge**3 / gemm_s / 1e12, 4), "copy_gbs": round(2 * copied / copy_s / 1e9, 3)}


def pairs(nodes: dict[str, list[int]], mib: int, rank: int, device: torch.device) -> Rows:
    """Return the bus bandwidth of pairs of nodes, each pair alone with its links but beside the round's other pairs."""
    names, mine = list(nodes), []
    for round_ in rounds(len(names)):
        for pair in round_:
            ranks = [r for place in pair for r in nodes[names[place]]]
            if rank in ranks:
                rows = allreduce([mib], device, ranks)
                mine.append({"nodes": [names[place] for place in pair], "mib": mib, "busbw_gbs": rows[0]["busbw_gbs"]})
    said = gathered(mine)
    return [pair for name, ranks in nodes.items() for pair in said[ranks[0]] if pair["nodes"][0] == name]


def rounds(num_nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Yield up to PAIR_ROUNDS rounds of pairs, a node at most once in each, nobody twice with the same partner."""
    seats: list[int | None] = [*range(num_nodes), *([None] if num_nodes % 2 else [])]
    for _ in range(min(PAIR_ROUNDS, len(seats) - 1)):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) for a, b in facing if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def clock_readings(device: torch.device) -> Readings:
    """Return this clock, in ns, before each of some meetings of all ranks and after it."""
    found = []
    for _ in range(CLOCK_ROUNDS):
        before = time.time_ns()
        slowest(0.0, device)
        found.append((before, time.time_ns()))
    return found


def clock_bounds_ms(own: Readings, other: Readings) -> list[float]:
    """Return between which bounds `own` clock is ahead of the `other`, in ms.

    The moment at which the last rank comes to a meeting lies, on each clock, between that rank's before and after.
    """
    low = max(mine[0] - theirs[1] for mine, theirs in zip(own, other, strict=True))
    high = min(mine[1] - theirs[0] for mine, theirs in zip(own, other, strict=True))
    return [round(low / 1e6, 3), round(high / 1e6, 3)]


def _group(ranks: list[int] | None) -> distributed.ProcessGroup | None:
    """Return a process group of these ranks, which only they need to ask for."""
    if ranks is None:
        return None
    limit = timedelta(seconds=MEETING_S)
    return distributed.new_group(ranks, timeout=limit, use_local_synchronization=True)


def _median_s(call: Callable[[], object], device: torch.device, agree: Callable[[float], float] = float) -> float:
    """Return the median seconds of a call; `agree` makes it, and how often it is repeated, the same for a group."""
    _laps(call, 1, device)
    expected_s = agree(_laps(call, 1, device)[0])
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(REPEAT_S / expected_s)))
    return agree(statistics.median(_laps(call, repeats, device)))


def _laps(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of several calls, one right behind the other."""
    if device.type == "cpu":
        times = [time.perf_counter()]
        for _ in range(repeats):
            call()
            times.append(time.perf_counter())
        return [b - a for a, b in pairwise(times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
