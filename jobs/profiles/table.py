"""Divide the time of profiled steps among the phases and parts of the model.

A step ends with its last kernel on the compute stream, so a step begins where the previous one ended; the first
profiled step only defines the start of the second. Each moment is counted once, for the first of these that is running:
a kernel on the compute stream, a copy there, communication, a kernel on another stream, a copy on another stream.
Everything else that runs at this moment is hidden. If nothing runs, the device waits for the host; this time (a gap)
belongs to the phase of the next kernel.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.contract.modules import ModuleTimes, Part, Phase, TimeRow
from jobs.profiles import ranges
from jobs.profiles.trace import Kernel, Kind, Moment, Span, Trace

Interval = tuple[float, float]
"""Begin and end in microseconds."""
Place = tuple[Phase, Part]
COMPUTES = (Kind.gemm, Kind.compute)


@dataclass(slots=True)
class Sums:
    """The times of one place (phase and part), in microseconds, over all profiled steps."""

    time_us: float = 0.0
    gemm_us: float = 0.0
    busy: list[Interval] = field(default_factory=list)
    """The intervals in which a kernel runs, hidden or not; they may overlap."""
    launches: int = 0
    by_kernel: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Microseconds and launches of each kernel, by its name."""


@dataclass(frozen=True, slots=True)
class DividedTime:
    """The time of the profiled steps by place."""

    sums: dict[Place, Sums]
    window: Interval
    num_steps: int


def module_times(
    trace: Trace, *, is_eager: bool, num_layers: int | None = None
) -> tuple[ModuleTimes, list[dict[str, Any]]]:
    """Return the table of a profile, and the kernels of each row, longest first."""
    divided = divide(trace)
    start_us, end_us = divided.window
    per_step = 1 / divided.num_steps
    to_ms = per_step / 1000
    rows, kernels = [], []
    for (phase, part), sums in sorted(divided.sums.items(), key=lambda item: _rank(item[0])):
        times = {
            "time_ms": sums.time_us * to_ms,
            "gemm_ms": sums.gemm_us * to_ms,
            "busy_ms": covered_us(sums.busy) * to_ms,
        }
        rows.append(TimeRow(phase=phase, part=part, launches=sums.launches * per_step, **times))
        for name, (kernel_us, launches) in sorted(sums.by_kernel.items(), key=lambda item: -item[1][0]):
            numbers = {"time_ms": round(kernel_us * to_ms, 6), "launches": launches * per_step}
            kernels.append({"phase": phase.name, "part": part.name, "kernel": name} | numbers)
    step_ms = (end_us - start_us) * to_ms
    num_steps = divided.num_steps
    times_table = ModuleTimes(
        device=trace.device,
        num_steps=num_steps,
        step_ms=step_ms,
        is_eager=is_eager,
        rows=rows,
        num_layers=num_layers,
    )
    return times_table, kernels


def divide(trace: Trace) -> DividedTime:
    """Return the sums of each place; their times add up to the window."""
    steps = [span for span in trace.ranges[trace.main_thread].spans if span.name == ranges.STEP]
    stream = critical_stream(trace.kernels)
    free = [window(trace.kernels, steps, stream)]
    divided = DividedTime(defaultdict(Sums), free[0], len(steps) - 1)
    for kernels in by_precedence(trace.kernels, stream):
        free = _add(trace, kernels, free, divided)
    on_stream = sorted(
        (kernel for kernel in trace.kernels if kernel.stream == stream), key=lambda kernel: kernel.start_us
    )
    starts = [kernel.start_us for kernel in on_stream]
    for start_us, end_us in free:
        following = bisect_left(starts, end_us)
        phase = phase_of(trace, on_stream[following]) if following < len(starts) else Phase.other
        divided.sums[phase, Part.gap].time_us += end_us - start_us
    return divided


def critical_stream(kernels: Iterable[Kernel]) -> int:
    """Return the compute stream: the one with the longest compute time."""
    busy_us: dict[int, float] = defaultdict(float)
    for kernel in kernels:
        if kernel.kind in COMPUTES:
            busy_us[kernel.stream] += kernel.end_us - kernel.start_us
    return max(busy_us, key=lambda stream: busy_us[stream])


def window(kernels: Iterable[Kernel], steps: list[Span], stream: int) -> Interval:
    """Return begin and end of the steps, without the first one.

    Raises:
        ValueError: there are fewer than two steps.
    """
    if len(steps) < 2:
        raise ValueError(
            f"the profile has {len(steps)} steps, but at least 2 steps are needed: the first step is not counted"
        )
    end_us = [0.0] * len(steps)
    for kernel in kernels:
        if kernel.stream != stream or kernel.launched is None:
            continue
        for number, step in enumerate(steps):
            if step.start_us <= kernel.launched.at_us < step.end_us:
                end_us[number] = max(end_us[number], kernel.end_us)
    return end_us[0], end_us[-1]


def claim(kernel: Kernel, free: deque[Interval]) -> tuple[list[Interval], list[Interval]]:
    """Remove from `free` the time until the end of a kernel; return the part during the kernel, and the part before."""
    counted, before = [], []
    while free and free[0][0] < kernel.end_us:
        start_us, end_us = free.popleft()
        if start_us < kernel.start_us:
            before.append((start_us, min(end_us, kernel.start_us)))
        if end_us > kernel.start_us:
            counted.append((max(start_us, kernel.start_us), min(end_us, kernel.end_us)))
        if end_us > kernel.end_us:
            free.appendleft((kernel.end_us, end_us))
            break
    return counted, before


def covered_us(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals."""
    total_us, until_us = 0.0, float("-inf")
    for start_us, end_us in sorted(intervals):
        total_us += max(0.0, end_us - max(start_us, until_us))
        until_us = max(until_us, end_us)
    return total_us


def place_of(trace: Trace, kernel: Kernel) -> Place:
    """Return the phase and part of a kernel."""
    if kernel.kind is Kind.communication:
        return phase_of(trace, kernel), Part.communication
    if kernel.kind is Kind.copy:
        return phase_of(trace, kernel), Part.copies
    return phase_of(trace, kernel), part_of(trace, kernel.launched)


def phase_of(trace: Trace, kernel: Kernel) -> Phase:
    """Return the phase when the kernel was launched: that of the launching thread, else of the training thread.

    Autograd's threads have ranges of recomputation only.
    """
    at_us = kernel.launched.at_us if kernel.launched else kernel.start_us
    launching = kernel.launched.thread if kernel.launched else trace.main_thread
    for thread in dict.fromkeys((launching, trace.main_thread)):
        for span in trace.ranges[thread].open_at(at_us):
            if isinstance(phase := ranges.parse_label(span.name), Phase):
                return phase
    return Phase.other


def part_of(trace: Trace, launched: Moment | None) -> Part:
    """Return the part whose range was open at a launch; for a backward operation, the part of its forward operation."""
    if launched is None:
        return Part.unnamed
    for span in trace.ranges[launched.thread].open_at(launched.at_us):
        if isinstance(part := ranges.parse_label(span.name), Part):
            stages = trace.attention_stages.get(Moment(span.thread, span.start_us), ())
            return next((stage for start_us, stage in reversed(stages) if start_us <= launched.at_us), part)
    for operation in trace.operations[launched.thread].open_at(launched.at_us):
        forward = trace.forward_of.get(Moment(operation.thread, operation.start_us))
        if forward is not None:
            return part_of(trace, forward)
    return Part.unnamed


def by_precedence(kernels: list[Kernel], stream: int) -> Iterable[list[Kernel]]:
    """Return the kernels in groups, in the order of precedence of the module's docstring."""
    groups: list[list[Kernel]] = [[] for _ in range(5)]
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        if kernel.kind is Kind.communication:
            groups[2].append(kernel)
        else:
            groups[(0 if kernel.stream == stream else 3) + (kernel.kind is Kind.copy)].append(kernel)
    return groups


def _add(trace: Trace, kernels: list[Kernel], free: list[Interval], divided: DividedTime) -> list[Interval]:
    """Add the free time that kernels (sorted by start) claim to their places; return the remaining free time."""
    first_us, last_us = divided.window
    ahead, left = deque(free), []
    for kernel in kernels:
        if kernel.end_us <= first_us or kernel.start_us >= last_us:
            continue
        counted, before = claim(kernel, ahead)
        left += before
        sums = divided.sums[place_of(trace, kernel)]
        time_us = sum(end_us - start_us for start_us, end_us in counted)
        inside = max(kernel.start_us, first_us), min(kernel.end_us, last_us)
        sums.time_us += time_us
        sums.gemm_us += time_us if kernel.kind is Kind.gemm else 0
        sums.busy.append(inside)
        sums.launches += kernel.is_first
        before_us, launches = sums.by_kernel.get(kernel.name, (0.0, 0))
        sums.by_kernel[kernel.name] = before_us + inside[1] - inside[0], launches + kernel.is_first
    return [*left, *ahead]


def _rank(place: Place) -> tuple[int, int]:
    """Return the sort key of a row: the order of the enumerations."""
    phase, part = place
    return list(Phase).index(phase), list(Part).index(part)
