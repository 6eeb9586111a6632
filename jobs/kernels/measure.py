"""Measure the points of a plan, each on all of its ranks together; the time of the slowest rank counts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from bench.contract.kernels import Kernels, Point
from bench.errors import BenchError
from jobs.kernels import attention, collectives, gemm, memcpy, timing
from jobs.kernels.timing import Prepared
from jobs.ranks.watchdog import MEASURING, Alive, ignore_progress

COLLECTIVE_TIMEOUT_S = 120
"""Timeout of collectives if no watchdog runs."""
_LOCAL = {"memcpy": memcpy.prepare, "attention": attention.prepare, "gemm": gemm.prepare}
_BACK_TO_BACK = ("memcpy", "collectives")
"""Families with calls as short as their launch. They run back to back, as in nccl-tests and nvbandwidth."""


@dataclass(frozen=True, slots=True)
class PointResult:
    """The result of a point: the record of its measurement, or the reason why there is none."""

    point: Point
    measured: dict[str, Any] | None = None
    reason: str = ""


def measure_points(
    points: list[Point],
    kernels: Kernels,
    device: torch.device,
    *,
    alive: Alive = ignore_progress,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
) -> Iterator[PointResult]:
    """Yield the result of each point that this rank takes part in, in their order.

    alive: called when a point begins, and when all of its ranks are ready; not while the point is timed.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    groups: dict[int, ProcessGroup | None] = {world: None, 1: None}
    for number, point in enumerate(points):
        if _takes_part(rank, point):
            report_progress = partial(alive, MEASURING, number, None)
            report_progress()
            if point.ranks not in groups:
                groups[point.ranks] = _first_ranks(point.ranks, timeout_s)
            yield _measure_point(point, kernels, device, groups[point.ranks], report_progress=report_progress)


def _takes_part(rank: int, point: Point) -> bool:
    return point.ranks > rank or point.ranks == 1


def max_silence_s(points: Sequence[Point], kernels: Kernels, rank: int) -> float:
    """Return the longest time without progress of a rank: the longest series of points without it, plus one point."""
    series = [len(list(each)) for takes_part, each in groupby(points, partial(_takes_part, rank)) if not takes_part]
    return (1 + max(series, default=0)) * max(kernels.point_s, (1 + timing.HEAT_UP_SHARE) * kernels.sustained_s)


def _first_ranks(count: int, timeout_s: float) -> ProcessGroup | None:
    """Return a process group of the first `count` ranks; only these ranks call this."""
    limit = timedelta(seconds=timeout_s)
    ranks = list(range(count))
    group: ProcessGroup | None = distributed.new_group(ranks, timeout=limit, use_local_synchronization=True)
    return group


def _measure_point(
    point: Point,
    kernels: Kernels,
    device: torch.device,
    group: ProcessGroup | None,
    *,
    report_progress: Callable[[], object],
) -> PointResult:
    prepared: Prepared | None = None
    expected_s, reason = 0.0, ""
    try:
        if point.family == "collectives":
            prepared = collectives.prepare(point, device, group)
        else:
            prepared = _LOCAL[point.family](point, device)
        timing.time_back_to_back(prepared.call, 1, device)  # the first call may compile or open connections
        expected_s = timing.time_back_to_back(prepared.call, 1, device)[0]
    except (RuntimeError, BenchError) as error:  # torch does not support this kernel here, or memory is exhausted
        if point.family == "collectives":
            raise  # the other ranks may be inside the collective
        message = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"rank {distributed.get_rank()}: {message[:200]}"
    reports = all_gather((reason, expected_s), group)
    report_progress()
    reason = next((reason for reason, _ in reports if reason), "")
    if prepared is None or reason:
        return PointResult(point, reason=reason)
    seconds = _timed(point, prepared, kernels, device, max(expected for _, expected in reports))
    times = all_gather(timing.summarize(seconds), group)
    rank = max(range(len(times)), key=lambda number: times[number].median_us)
    return PointResult(point, asdict(times[rank]) | {"rank": rank, "implementation": prepared.implementation})


def _timed(point: Point, prepared: Prepared, kernels: Kernels, device: torch.device, expected_s: float) -> list[float]:
    """Return the seconds of each run; the number of runs depends on the time that the slowest rank expects."""
    if point.is_sustained:
        return timing.time_sustained(prepared.call, kernels.sustained_s, device)
    repeats = min(kernels.repeats, max(timing.MIN_RUNS, int(kernels.point_s / max(expected_s, 1e-9))))
    if point.family in _BACK_TO_BACK:
        return timing.time_back_to_back(prepared.call, repeats, device)
    return timing.time_cool(prepared.call, repeats, device)


def all_gather(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of the group; this is also a barrier."""
    values = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values
