"""Measure the points of a plan, each on all of its ranks together; what the slowest of them took counts."""

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
from jobs.ranks.watchdog import MEASURING, Alive, nobody_asks

MEETING_S = 120
"""The longest wait for another rank in a collective, where no watchdog ends the trial."""
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


def outcomes(
    points: list[Point],
    kernels: Kernels,
    device: torch.device,
    *,
    alive: Alive = nobody_asks,
    meeting_s: float = MEETING_S,
) -> Iterator[Outcome]:
    """Yield what came of each point that this rank takes part in, in their order.

    `alive` is told when a point begins, and when all of its ranks have met; nothing is told while it is timed.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    groups: dict[int, ProcessGroup | None] = {world: None, 1: None}
    for number, point in enumerate(points):
        if _takes_part(rank, point):
            beat = partial(alive, MEASURING, number, None)
            beat()
            if point.ranks not in groups:
                groups[point.ranks] = _first_ranks(point.ranks, meeting_s)
            yield _outcome(point, kernels, device, groups[point.ranks], beat=beat)


def _takes_part(rank: int, point: Point) -> bool:
    return point.ranks > rank or point.ranks == 1


def longest_silence_s(points: Sequence[Point], kernels: Kernels, rank: int) -> float:
    """Return how long nothing is heard of a rank by the plan: the longest row of points without it, and one more."""
    rows = [len(list(row)) for takes_part, row in groupby(points, partial(_takes_part, rank)) if not takes_part]
    return (1 + max(rows, default=0)) * max(kernels.point_s, (1 + timing.HEATING) * kernels.sustained_s)


def _first_ranks(count: int, meeting_s: float) -> ProcessGroup | None:
    """Return a group of the first ranks, which only they have to create."""
    limit = timedelta(seconds=meeting_s)
    ranks = list(range(count))
    group: ProcessGroup | None = distributed.new_group(ranks, timeout=limit, use_local_synchronization=True)
    return group


def _outcome(
    point: Point,
    kernels: Kernels,
    device: torch.device,
    group: ProcessGroup | None,
    *,
    beat: Callable[[], object],
) -> Outcome:
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
    beat()
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
