"""Types of the GPU time of a server by kernels, and along a decode step, which a profile fills in."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.contract import codec


class KernelClass(StrEnum):
    """What a kernel does, by its name; or that no kernel runs."""

    element_wise = "element_wise"
    rope = "rope"
    triton = "triton"
    """Kernels written in Triton that are in none of the other classes; LightLLM's attention is one of them."""
    gemm = "gemm"
    norm = "norm"
    attention = "attention"
    """Fused attention that is not written in Triton."""
    other_computation = "other_computation"
    all_reduce = "all_reduce"
    all_gather = "all_gather"
    other_communication = "other_communication"
    other = "other"
    """Copies, and the time without a kernel."""


COMPUTATION = (
    *(KernelClass.element_wise, KernelClass.rope, KernelClass.triton, KernelClass.gemm, KernelClass.norm),
    *(KernelClass.attention, KernelClass.other_computation),
)
COMMUNICATION = (KernelClass.all_reduce, KernelClass.all_gather, KernelClass.other_communication)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """The time of a class of kernels, over all profiled steps. Overlapping kernels are counted once."""

    kernels: KernelClass
    time_ms: float
    launches: int
    """On a CPU: operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The parts of all decode steps, whose boundaries are the norms."""

    before_layers_ms: float
    attention_ms: float
    """From the first norm of each layer to its second, with projections and all-reduce."""
    mlp_ms: float
    """From the second norm of each layer to the next one."""
    after_layers_ms: float
    """From the last norm to the next step, with head, sampling and the wait for the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimes:
    """A profile of one GPU of a server while it decodes."""

    device: str
    """cuda or cpu."""
    running: int
    """Requests that were being decoded when the profile began."""
    time_ms: float
    """The profiled time: of all decode steps, or of the whole profile if no steps were found."""
    rows: list[KernelTime]
    num_steps: int | None = None
    """Decode steps; None if the norms do not show them."""
    timeline: Timeline | None = None


def plain(times: ServerTimes) -> dict[str, Any]:
    """Return the JSON data; times are rounded to a nanosecond."""
    raw: dict[str, Any] = codec.plain(times)
    for block in (raw, *raw["rows"], raw["timeline"] or {}):
        block.update({name: round(value, 6) for name, value in block.items() if isinstance(value, float)})
    return raw


def parsed(raw: Any) -> ServerTimes | None:
    """Return the times from `plain`; None if they are missing or damaged."""
    try:
        times = codec.typed(ServerTimes, raw)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return times if times.time_ms > 0 and times.num_steps != 0 else None
