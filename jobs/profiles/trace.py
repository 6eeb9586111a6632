"""Read a trace of torch.profiler in Chrome's format: kernels, their launches, and the ranges of host threads.

On a CPU there are no kernels. Instead, the operations of the training thread are used, each with its self time (without
nested operations), and the busy time of gloo's threads counts as communication.
"""

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from bench.contract.modules import Part
from jobs.profiles.ranges import STEP, parse_label


@dataclass(frozen=True, slots=True)
class Span:
    """An operation or a range of a host thread."""

    name: str
    thread: int
    start_us: float
    end_us: float


class NestedSpans:
    """The spans of one thread, which are nested."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: (span.start_us, -span.end_us))
        self.starts = [span.start_us for span in self.spans]
        self.parents: list[int] = []
        """For each span the index of the innermost span that was open when it began; -1: none."""
        opened: list[int] = []
        for index, span in enumerate(self.spans):
            while opened and self.spans[opened[-1]].end_us <= span.start_us:
                opened.pop()
            self.parents.append(opened[-1] if opened else -1)
            opened.append(index)

    @property
    def duration_us(self) -> float:
        """The time with an open span."""
        outermost = (span for span, parent in zip(self.spans, self.parents, strict=True) if parent < 0)
        return sum(span.end_us - span.start_us for span in outermost)

    def open_at(self, at_us: float) -> Iterator[Span]:
        """Yield the spans that are open at a moment, the innermost one first."""
        index = bisect_right(self.starts, at_us) - 1
        while index >= 0:
            if at_us < self.spans[index].end_us:
                yield self.spans[index]
            index = self.parents[index]

    def self_times(self) -> Iterator[tuple[Span, list[tuple[float, float]]]]:
        """Yield each span with the intervals in which no nested span is open."""
        inside: list[list[Span]] = [[] for _ in self.spans]
        for span, parent in zip(self.spans, self.parents, strict=True):
            if parent >= 0:
                inside[parent].append(span)
        for span, children in zip(self.spans, inside, strict=True):
            bounds = [span.start_us, *(at for child in children for at in (child.start_us, child.end_us)), span.end_us]
            yield span, list(zip(bounds[::2], bounds[1::2], strict=True))


CPU_STREAM = -1
"""The stream of the training thread's operations; operations of other threads have the thread's number as stream."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_COMMUNICATION = re.compile(r"^(nccl|gloo:|c10d::)", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention", re.IGNORECASE)
_GEMM = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitK|matmul"  # cuBLAS, cuBLASLt and CUTLASS
    r"|^_(down|down_backward|add_down_gradient)$"  # kernels of the LoRA adapters
    r"|^_C::\w*mm$"  # vLLM's on a CPU
    r"|^aten::(mm|addmm|bmm|baddbmm|addmv|mv|_scaled_mm|_addmm_activation|mkldnn_linear)$",
    re.IGNORECASE,
)
_PRODUCTS = ("aten::matmul", "aten::bmm", "aten::baddbmm")
_SOFTMAX = re.compile(r"^aten::_?softmax$")
_COPY = re.compile(r"HtoD|DtoH|PtoP")


class Kind(Enum):
    """The kind of work of a kernel."""

    gemm = "gemm"
    compute = "compute"
    communication = "communication"
    copy = "copy"
    """Between host and device, or between devices."""


class Moment(NamedTuple):
    """A moment in a host thread."""

    thread: int
    at_us: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel on a stream of the device; on a CPU, an interval of an operation."""

    name: str
    kind: Kind
    stream: int
    start_us: float
    end_us: float
    launched: Moment | None
    """Moment of the launch; None: not in the trace."""
    is_first: bool = True
    """False for all intervals of an operation except the first."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The contents of a profile."""

    device: str
    main_thread: int
    """The training thread; autograd has other threads."""
    kernels: list[Kernel]
    ranges: dict[int, NestedSpans]
    """By thread."""
    operations: dict[int, NestedSpans]
    """By thread."""
    forward_of: dict[Moment, Moment]
    """The start of each backward operation, and the start of its forward operation."""
    attention_stages: dict[Moment, list[tuple[float, Part]]]
    """The parts of each attention module, by the start of its range: when each part begins, in order."""


def read(path: Path) -> Trace:
    """Read the file of a profile, which has at least one step."""
    return trace(events(path))


def events(path: Path) -> list[dict[str, Any]]:
    """Return the events in the file of a profile, which may be compressed."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        recorded: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return recorded


def trace(events: list[dict[str, Any]]) -> Trace:
    """Return the trace of a profile's events. Without steps, the main thread is the one with most operations."""
    timed = [event for event in events if event.get("ph") == "X"]
    ranges = [_span(event) for event in timed if event.get("cat") == "user_annotation"]
    operations = [_span(event) for event in timed if event.get("cat") == "cpu_op"]
    on_device = [event for event in timed if event.get("cat") in _ON_DEVICE]
    by_thread, ranges_by_thread = _nested(operations), _nested(ranges)
    main_thread = next((span.thread for span in ranges if span.name == STEP), None)
    if main_thread is None:
        main_thread = max(by_thread, key=lambda thread: by_thread[thread].duration_us, default=-1)
    on_cpu = [*_pieces(by_thread[main_thread]), *_gloo(ranges)] if not on_device else []
    return Trace(
        device="cuda" if on_device else "cpu",
        main_thread=main_thread,
        kernels=list(_kernels(on_device, timed)) if on_device else on_cpu,
        ranges=ranges_by_thread,
        operations=by_thread,
        forward_of=_forward_of(events),
        attention_stages=dict(_attention_stages(ranges_by_thread, by_thread)),
    )


def _attention_stages(
    ranges: dict[int, NestedSpans], operations: dict[int, NestedSpans]
) -> Iterator[tuple[Moment, list[tuple[float, Part]]]]:
    """Yield the stages of each range of attention that is a whole module, with projections inside.

    The operations between the projections are RoPE and the split into heads, then either one fused operation, or a
    product, softmax and another product. Scaling and mask belong to the first product.
    """
    for thread, nested in list(ranges.items()):
        for span in nested.spans:
            if parse_label(span.name) is not Part.attention:
                continue
            is_module = any(
                parse_label(one.name) is Part.qkv and span.start_us < one.start_us < span.end_us for one in nested.spans
            )
            if is_module and (stages := _stages(span, list(_own_operations(span, nested, operations[thread])))):
                yield Moment(thread, span.start_us), stages


def _own_operations(span: Span, ranges: NestedSpans, operations: NestedSpans) -> Iterator[Span]:
    """Yield the outermost operations of a range that are in no range of another part inside it."""
    until_us = span.start_us
    for index in range(bisect_left(operations.starts, span.start_us), bisect_left(operations.starts, span.end_us)):
        operation = operations.spans[index]
        if operation.start_us < until_us:
            continue
        until_us = operation.end_us
        opened = (one for one in ranges.open_at(operation.start_us) if isinstance(parse_label(one.name), Part))
        if next(opened, None) == span:
            yield operation


def _stages(span: Span, operations: list[Span]) -> list[tuple[float, Part]]:
    """Return when RoPE, scores, softmax and values begin, or RoPE and fused attention; empty for neither."""
    products = [one.start_us for one in operations if one.name in _PRODUCTS]
    softmax = [one.start_us for one in operations if _SOFTMAX.search(one.name)]
    fused = [one.start_us for one in operations if _ATTENTION.search(one.name)]
    if fused:
        return [(span.start_us, Part.rope), (fused[0], Part.attention)]
    if len(products) == 2 and len(softmax) == 1 and products[0] < softmax[0] < products[1]:
        starts = (span.start_us, products[0], softmax[0], products[1])
        return list(zip(starts, (Part.rope, Part.scores, Part.softmax, Part.values), strict=True))
    return []


def kind_of(name: str) -> Kind:
    """Return the kind of a kernel by its name."""
    if _COMMUNICATION.search(name):
        return Kind.communication
    if _ATTENTION.search(name):
        return Kind.compute
    return Kind.gemm if _GEMM.search(name) else Kind.compute


def _kernels(on_device: list[dict[str, Any]], timed: list[dict[str, Any]]) -> Iterator[Kernel]:
    """Yield the kernels with their launches, which have the same correlation id.

    If the launch is missing, or is in a thread without operations, the operation with the same external id is used.
    """
    launches, operations = {}, {}
    for event in timed:
        args, moment = event.get("args", {}), Moment(event["tid"], event["ts"])
        if event.get("cat") in _LAUNCHES and "correlation" in args:
            launches[args["correlation"]] = moment
        elif event.get("cat") in ("cpu_op", "user_annotation") and "External id" in args:
            operations[args["External id"]] = moment
    threads = {moment.thread for moment in operations.values()}
    for event in on_device:
        name, args, is_copy = event["name"], event["args"], event["cat"] == "gpu_memcpy"
        launched, operation = launches.get(args.get("correlation")), operations.get(args.get("External id"))
        if operation is not None and (launched is None or launched.thread not in threads):
            launched = operation
        kind = Kind.copy if is_copy and _COPY.search(name) else kind_of(name)
        yield Kernel(name, kind, args["stream"], event["ts"], event["ts"] + event["dur"], launched)


def _pieces(operations: NestedSpans) -> Iterator[Kernel]:
    for span, pieces in operations.self_times():
        for number, (start_us, end_us) in enumerate(pieces):
            launched = Moment(span.thread, start_us)
            yield Kernel(span.name, kind_of(span.name), CPU_STREAM, start_us, end_us, launched, number == 0)


def _gloo(ranges: list[Span]) -> Iterator[Kernel]:
    for span in ranges:
        if kind_of(span.name) is Kind.communication:
            yield Kernel(span.name, Kind.communication, span.thread, span.start_us, span.end_us, None)


def _forward_of(events: list[dict[str, Any]]) -> dict[Moment, Moment]:
    """Return torch's links between forward and backward operations."""
    ends: dict[str, dict[int, Moment]] = {"s": {}, "f": {}}
    for event in events:
        if event.get("cat") == "fwdbwd":
            ends[event["ph"]][event["id"]] = Moment(event["tid"], event["ts"])
    return {backward: ends["s"][link] for link, backward in ends["f"].items() if link in ends["s"]}


def _span(event: dict[str, Any]) -> Span:
    return Span(event["name"], event["tid"], event["ts"], event["ts"] + event["dur"])


def _nested(spans: list[Span]) -> dict[int, NestedSpans]:
    by_thread = defaultdict(list)
    for span in spans:
        by_thread[span.thread].append(span)
    return defaultdict(
        lambda: NestedSpans(()), {thread: NestedSpans(thread_spans) for thread, thread_spans in by_thread.items()}
    )
