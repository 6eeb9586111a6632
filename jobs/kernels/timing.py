"""Time calls on a device: back to back, separately on a cool device, or sustained for seconds.

On a GPU times are measured between events on the stream, and the device never waits for the host inside a measurement.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

PAUSE_S = 0.005
"""Pause before each cool run: with a GEMM of 2 ms every 7 ms a GPU stays far below its power limit."""
HEAD_START_CYCLES = 400_000
"""The device sleeps this long (0.2 ms at 1.98 GHz) before a cool run, so that the host has launched the whole call by
then. Source: torch's own benchmarks use torch.cuda._sleep for this."""
L2_TIMES = 2
"""L2_TIMES x the size of the L2 cache is written before a cool run, so that operands are read from memory."""
STRETCH_S = 0.02
HEAT_UP_SHARE = 0.25
"""A sustained point first runs untimed for this share of its time, so that the device reaches its power limit."""
MIN_RUNS = 3
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The duration of a call over n runs."""

    n: int
    median_us: float
    p10_us: float
    p90_us: float


def summarize(seconds: list[float]) -> Times:
    """Return median and percentiles of measured seconds."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    in_us = (round(1e6 * second, 4) for second in (statistics.median(seconds), tenths[0], tenths[8]))
    median_us, p10_us, p90_us = in_us
    return Times(n=len(seconds), median_us=median_us, p10_us=p10_us, p90_us=p90_us)


def time_back_to_back(call: Call, repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `repeats` calls that run back to back."""
    if device.type == "cpu":
        ends = [time.perf_counter()]
        for _ in range(repeats):
            call()
            ends.append(time.perf_counter())
        return [b - a for a, b in pairwise(ends)]
    marks = [_record_event()]
    for _ in range(repeats):
        call()
        marks.append(_record_event())
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def time_cool(call: Call, repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each of `repeats` separate calls: after a pause, with a flushed L2 cache."""
    if device.type == "cpu":
        return time_back_to_back(call, repeats, device)
    size = L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size
    cache = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        time.sleep(PAUSE_S)
        cache.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start = _record_event()
        call()
        end = _record_event()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return seconds


def time_sustained(call: Call, duration_s: float, device: torch.device) -> list[float]:
    """Return the mean seconds of a call in each stretch of calls, for `duration_s` after the device has heated up."""
    per_stretch = max(1, round(STRETCH_S / max(time_back_to_back(call, 1, device)[0], 1e-6)))

    def stretch() -> None:
        for _ in range(per_stretch):
            call()

    _stretches(stretch, HEAT_UP_SHARE * duration_s, device)
    return [second / per_stretch for second in _stretches(stretch, duration_s, device)]


def _stretches(stretch: Call, duration_s: float, device: torch.device) -> list[float]:
    """Return the seconds of each stretch; the host is at most two stretches ahead of the device."""
    until = time.perf_counter() + duration_s
    seconds: list[float] = []
    if device.type == "cpu":
        while time.perf_counter() < until or len(seconds) < MIN_RUNS:
            seconds += time_back_to_back(stretch, 1, device)
        return seconds
    marks = [_record_event()]
    while time.perf_counter() < until or len(marks) <= MIN_RUNS:
        stretch()
        marks.append(_record_event())
        marks[-3 if marks[2:] else 0].synchronize()
    torch.cuda.synchronize(device)
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with its operands, and its implementation for the log."""

    call: Call
    implementation: str = ""
