"""Measure the points of a plan, each on all of its ranks together; what the slowest of them took counts."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from bench.contract.kernels import Kernels, Point
from bench.errors import BenchError
from jobs.kernels import attention, collectives, gemm, memcpy, timing
from jobs.kernels.prepared import Prepared

MEETING_S = 120
"""The longest wait for another rank in a collective."""
_LOCAL = {"memcpy": memcpy.prepare, "attention": attention.prepare, "gemm": gemm.prepare}
_BACK_TO_BACK = ("memcpy", "collectives")
"""Families of calls as short as their launch, which are launched one right after another, as nccl-tests and nvbandwidth
do it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a point: the record of its measurement, or why there is none."""

    point: Point
    measured: dict[str, Any] | None = None
    reason: str = ""


def outcomes(points: list[Point], kernels: Kernels, device: torch.device) -> Iterator[Outcome]:
    """Yield what came of each point that this rank takes part in, in their order."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    groups: dict[int, ProcessGroup | None] = {world: None, 1: None}
    for point in points:
        if point.ranks > rank or point.ranks == 1:
            if point.ranks not in groups:
                groups[point.ranks] = _first_ranks(point.ranks)
            yield _outcome(point, kernels, device, groups[point.ranks])


def _first_ranks(count: int) -> ProcessGroup | None:
    """Return a group of the first ranks, which only they have to create."""
    limit = timedelta(seconds=MEETING_S)
    return distributed.new_group(list(range(count)), timeout=limit, use_local_synchronization=True)


def _outcome(point: Point, kernels: Kernels, device: torch.device, group: ProcessGroup | None) -> Outcome:
    prepared: Prepared | None = None
    expected_s, reason = 0.0, ""
    try:
        if point.family == "collectives":
            prepared = collectives.prepare(point, device, group)
        else:
            prepared = _LOCAL[point.family](point, device)
        timing.laps(prepared.call, 1, device)  # it may compile, or open connections
        expected_s = timing.laps(prepared.call, 1, device)[0]
    except (RuntimeError, BenchError) as error:  # torch has no such kernel here, or not enough memory
        if point.family == "collectives":
            raise  # the other ranks may be in it
        words = (str(error).splitlines() or [type(error).__name__])[0]
        reason = f"rank {distributed.get_rank()}: {words[:200]}"
    told = gathered((reason, expected_s), group)
    reason = next((words for words, _ in told if words), "")
    if prepared is None or reason:
        return Outcome(point, reason=reason)
    seconds = _timed(point, prepared, kernels, device, max(expected for _, expected in told))
    every = gathered(timing.times(seconds), group)
    rank = max(range(len(every)), key=lambda number: every[number].median_us)
    return Outcome(point, asdict(every[rank]) | {"rank": rank, "ran": prepared.ran})


def _timed(point: Point, prepared: Prepared, kernels: Kernels, device: torch.device, expected_s: float) -> list[float]:
    """Return the seconds of each run; the number of runs follows from what the slowest rank expects of one."""
    if point.is_sustained:
        return timing.sustained(prepared.call, kernels.sustained_s, device)
    repeats = min(kernels.repeats, max(timing.MIN_RUNS, int(kernels.point_s / max(expected_s, 1e-9))))
    if point.family in _BACK_TO_BACK:
        return timing.laps(prepared.call, repeats, device)
    return timing.cool(prepared.call, repeats, device)


def gathered(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Return the value of every rank of the group; this is a barrier, too."""
    everyone = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everyone, value, group=group)
    return everyone
