"""Time calls on a device: one after another, each by itself on a cool device, or without a pause for seconds.

On a GPU times are taken between events on its stream, and the host never makes the device wait within a measurement.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

PAUSE_S = 0.005
"""Before each cool run: with a GEMM of 2 ms every 7 ms a GPU stays far below its power limit."""
HEAD_START_CYCLES = 400_000
"""So long, 0.2 ms at 1.98 GHz, the device sleeps before a cool run: the host has launched all of it by then. Source:
torch's own benchmarks use torch.cuda._sleep for that."""
L2_TIMES = 2
"""Of the L2 cache's size is what is written before a cool run, so that operands come from memory."""
STRETCH_S = 0.02
HEATING = 0.25
"""A sustained point is not timed for this share of its time: the device has to reach its power limit first."""
MIN_RUNS = 3
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long a call took, over n runs."""

    n: int
    median_us: float
    p10_us: float
    p90_us: float


def times(seconds: list[float]) -> Times:
    """Return how measured seconds are distributed."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    in_us = (round(1e6 * second, 4) for second in (statistics.median(seconds), tenths[0], tenths[8]))
    median_us, p10_us, p90_us = in_us
    return Times(n=len(seconds), median_us=median_us, p10_us=p10_us, p90_us=p90_us)


def laps(call: Call, repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of several calls, one right after another."""
    if device.type == "cpu":
        ends = [time.perf_counter()]
        for _ in range(repeats):
            call()
            ends.append(time.perf_counter())
        return [b - a for a, b in pairwise(ends)]
    marks = [_mark()]
    for _ in range(repeats):
        call()
        marks.append(_mark())
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def cool(call: Call, repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of several calls, each by itself: after a pause, with nothing of it in the cache."""
    if device.type == "cpu":
        return laps(call, repeats, device)
    size = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    cache = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        time.sleep(PAUSE_S)
        cache.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start = _mark()
        call()
        end = _mark()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def sustained(call: Call, duration_s: float, device: torch.device) -> list[float]:
    """Return the seconds of a call in each of the stretches that fill the duration, after the device is hot."""
    per_stretch = max(1, round(STRETCH_S / max(laps(call, 1, device)[0], 1e-6)))

    def stretch() -> None:
        for _ in range(per_stretch):
            call()

    _stretches(stretch, HEATING * duration_s, device)
    return [second / per_stretch for second in _stretches(stretch, duration_s, device)]


def _stretches(stretch: Call, duration_s: float, device: torch.device) -> list[float]:
    """Return the seconds of each stretch; the host is at most two of them ahead of the device."""
    until = time.perf_counter() + duration_s
    seconds: list[float] = []
    if device.type == "cpu":
        while time.perf_counter() < until or len(seconds) < MIN_RUNS:
            seconds += laps(stretch, 1, device)
        return seconds
    marks = [_mark()]
    while time.perf_counter() < until or len(marks) <= MIN_RUNS:
        stretch()
        marks.append(_mark())
        marks[-3 if marks[2:] else 0].synchronize()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with its operands, and what computes it, for the log."""

    call: Call
    ran: str = ""
