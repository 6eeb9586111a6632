"""Divide the GPU time of a server among classes of kernels, and a decode step among its layers.

A server has no ranges of ours, so everything follows from the names of kernels and from their order. The norms delimit
the parts of a step: attention and MLP of each layer begin with one, and a last one precedes the head. Only attention
has RoPE, attention kernels and writes to the KV cache, so it is known which norm is which. A profile may begin and end
in the middle of a step: only whole steps are counted.

Each moment is counted once, by the order of `jobs.profiles.table`.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.contract.server_times import KernelClass, KernelTime, ServerTimes, Timeline
from jobs.profiles import trace as traces
from jobs.profiles.table import COMPUTES, Interval, by_precedence, claim, critical_stream
from jobs.profiles.trace import Kernel, Kind, Trace

_NORM = re.compile(r"rms_?norm|layer_?norm|rsqrt", re.IGNORECASE)
"""Also of norms that the compiler has fused or that are computed by single operations, which have one rsqrt."""
_ROPE = re.compile(r"rope\b|rope_|rotary", re.IGNORECASE)
_ATTENTION = re.compile(
    r"flash|fmha|sdpa|attention|attn|paged|token_att|decode_stage|scaled_dot_product"
    r"|reshape_and_cache|copy_kv|kv_cache",  # writes to the KV cache
    re.IGNORECASE,
)
_ALL_REDUCE = re.compile(r"all_?reduce|cross_device_reduce", re.IGNORECASE)
_ALL_GATHER = re.compile(r"all_?gather", re.IGNORECASE)
_ELEMENT_WISE = re.compile(
    r"elementwise|element_wise|silu|act_and_mul"
    r"|^aten::(add|sub|mul|div|pow|neg|silu|exp|cos|sin|copy|fill|where|masked_fill|clamp)_?$",
    re.IGNORECASE,
)
_TRITON = re.compile(r"^(?!cudnn|ampere|sm\d|nvjet|cutlass)[A-Za-z_]\w*$")
"""Triton names a kernel after its function; a name of C++ has its arguments."""


def server_times(trace: Trace, *, num_layers: int, running: int) -> ServerTimes:
    """Return the times of a profile; `running` is the number of requests that the server decoded."""
    stream = critical_stream(trace.kernels)
    on_stream = sorted((one for one in trace.kernels if one.stream == stream), key=lambda one: one.start_us)
    steps = decode_steps(on_stream, num_layers)
    timeline = None if not steps else _timeline(steps, num_layers)
    whole = min(one.start_us for one in trace.kernels), max(one.end_us for one in trace.kernels)
    windows = [(step[0], step[-1]) for step in steps] or [whole]
    spent_us, launches = _by_class(trace.kernels, stream, windows)
    return ServerTimes(
        device=trace.device,
        running=running,
        time_ms=sum(end_us - start_us for start_us, end_us in windows) / 1000,
        rows=[
            KernelTime(kernels=one, time_ms=spent_us[one] / 1000, launches=launches[one])
            for one in KernelClass
            if one in spent_us
        ],
        num_steps=len(steps) or None,
        timeline=timeline,
    )


def class_of(kernel: Kernel) -> KernelClass:
    """Return the class of a kernel, by its name."""
    name = kernel.name
    if kernel.kind is Kind.copy:
        return KernelClass.other
    if _ALL_REDUCE.search(name):
        return KernelClass.all_reduce
    if _ALL_GATHER.search(name):
        return KernelClass.all_gather
    if kernel.kind is Kind.communication:
        return KernelClass.other_communication
    if _NORM.search(name):
        return KernelClass.norm
    if _ROPE.search(name):
        return KernelClass.rope
    if kernel.kind is Kind.gemm:
        return KernelClass.gemm
    if kernel.stream != traces.CPU_STREAM and _TRITON.search(name):
        return KernelClass.triton
    if _ATTENTION.search(name):
        return KernelClass.attention
    return KernelClass.element_wise if _ELEMENT_WISE.search(name) else KernelClass.other_computation


def kernel_list(trace: Trace) -> list[dict[str, Any]]:
    """Return the time, launches and class of each kernel by its name, the longest first."""
    spent_us, launches, classes = defaultdict[str, float](float), defaultdict[str, int](int), {}
    for one in trace.kernels:
        spent_us[one.name] += one.end_us - one.start_us
        launches[one.name] += one.is_first
        classes[one.name] = class_of(one).name
    return [
        {"class": classes[name], "kernel": name, "time_ms": round(us / 1000, 6), "launches": launches[name]}
        for name, us in sorted(spent_us.items(), key=lambda item: -item[1])
    ]


def decode_steps(kernels: Sequence[Kernel], num_layers: int) -> list[list[float]]:
    """Return the whole steps of a stream: begin, the beginning of each norm, end; in microseconds.

    A step begins after the longest idle time between the last norm of the step before and its own first one.
    """
    norms = [place for place, kernel in enumerate(kernels) if _NORM.search(kernel.name)]
    norms = [norm for norm in norms if not norm or not _NORM.search(kernels[norm - 1].name)]  # one of several kernels
    ends = [*norms[1:], len(kernels)][: len(norms)]
    kinds = "".join(
        "A" if any(_is_of_attention(one) for one in kernels[norm:end]) else "M"
        for norm, end in zip(norms, ends, strict=True)
    )
    steps = []
    for match in re.finditer(f"(?:AM){{{num_layers}}}M", kinds):
        first, last = match.start(), match.end() - 1
        begin = _border(kernels, norms[first - 1], norms[first]) if first else 0
        following = norms[last + 1] if last + 1 < len(norms) else None
        end_us = max(kernel.end_us for kernel in kernels[norms[last] :])
        if following is not None:
            end_us = kernels[_border(kernels, norms[last], following)].start_us
        steps.append([kernels[begin].start_us, *(kernels[n].start_us for n in norms[first : last + 1]), end_us])
    return steps


def _is_of_attention(kernel: Kernel) -> bool:
    return bool(_ROPE.search(kernel.name) or _ATTENTION.search(kernel.name))


def _border(kernels: Sequence[Kernel], last_norm: int, first_norm: int) -> int:
    """Return the kernel after the longest idle time between two norms."""
    places = range(last_norm + 1, first_norm + 1)
    return max(places, key=lambda place: kernels[place].start_us - kernels[place - 1].end_us)


def _timeline(steps: Sequence[Sequence[float]], num_layers: int) -> Timeline:
    before = attention = mlp = after = 0.0
    for step in steps:
        parts = [end_us - start_us for start_us, end_us in pairwise(step)]
        before += parts[0]
        attention += sum(parts[1 : 1 + 2 * num_layers : 2])
        mlp += sum(parts[2 : 2 + 2 * num_layers : 2])
        after += parts[-1]
    return Timeline(
        before_layers_ms=before / 1000, attention_ms=attention / 1000, mlp_ms=mlp / 1000, after_layers_ms=after / 1000
    )


def _by_class(
    kernels: list[Kernel], stream: int, windows: list[Interval]
) -> tuple[dict[KernelClass, float], dict[KernelClass, int]]:
    """Return microseconds and launches of each class within the windows; what no kernel claims is `other`."""
    free, spent_us, launches = list(windows), defaultdict[KernelClass, float](float), defaultdict[KernelClass, int](int)
    for group in by_precedence(kernels, stream):
        ahead, left = deque(free), list[Interval]()
        for kernel in group:
            counted, before = claim(kernel, ahead)
            left += before
            spent_us[class_of(kernel)] += sum(end_us - start_us for start_us, end_us in counted)
            inside = any(start_us <= kernel.start_us < end_us for start_us, end_us in windows)
            launches[class_of(kernel)] += kernel.is_first and inside
        free = [*left, *ahead]
    spent_us[KernelClass.other] += sum(end_us - start_us for start_us, end_us in free)
    return {one: us for one, us in spent_us.items() if us > 0 or one is KernelClass.other}, launches


def read(paths: Iterable[Path]) -> tuple[Path, Trace] | None:
    """Return the trace of the server's first GPU, and its file; on a CPU, the one with most work.

    Servers also write traces of processes that only handle requests. None if there is no trace with work.
    """
    candidates = []
    for path in sorted(paths):
        events = traces.events(path)
        trace = traces.trace(events)
        if any(kernel.kind in COMPUTES for kernel in trace.kernels):
            candidates.append((_gpu(events), -sum(one.end_us - one.start_us for one in trace.kernels), path, trace))
    if not candidates:
        return None
    on_gpus = [one for one in candidates if one[3].device == "cuda"]
    *_, path, trace = min(on_gpus or candidates, key=lambda one: one[:2])
    return path, trace


def _gpu(events: list[dict[str, Any]]) -> int:
    """Return the number of the GPU of a trace's first kernel; 0 on a CPU."""
    devices = (event["args"].get("device", 0) for event in events if event.get("cat") == "kernel")
    return int(next(devices, 0))
