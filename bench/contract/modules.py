"""Where a step's time goes: the phases of a step and the parts of a model, and the table that a profile fills."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.contract import codec


class Phase(StrEnum):
    """When in a step."""

    forward = "forward"
    backward = "backward"
    """With what is recomputed, and the reduction of gradients over replicas."""
    optimizer = "optimizer"
    other = "other"
    """Between the three."""


class Part(StrEnum):
    """What a time is spent on: a module of the model, a part of the update, or one of the last four."""

    input = "input"
    embedding = "embedding"
    norm = "norm"
    qkv = "qkv"
    rope = "rope"
    attention = "attention"
    scores = "scores"
    softmax = "softmax"
    values = "values"
    output = "output"
    fc1 = "fc1"
    activation = "activation"
    fc2 = "fc2"
    adapters = "adapters"
    residual = "residual"
    weights = "weights"
    head = "head"
    loss = "loss"
    zero_gradients = "zero_gradients"
    gradient_norm = "gradient_norm"
    adamw = "adamw"
    unnamed = "unnamed"
    communication = "communication"
    copies = "copies"
    gap = "gap"


TITLES = {
    Part.input: "rows to the device",
    Part.embedding: "embedding",
    Part.norm: "norms (RMSNorm or LayerNorm)",
    Part.qkv: "QKV projection",
    Part.rope: "RoPE and heads",
    Part.attention: "attention (fused: products and softmax)",
    Part.scores: "attention: Q x K",
    Part.softmax: "attention: softmax",
    Part.values: "attention: P x V",
    Part.output: "output projection",
    Part.fc1: "MLP: first linear",
    Part.activation: "MLP: activation",
    Part.fc2: "MLP: second linear",
    Part.adapters: "adapters",
    Part.residual: "residuals",
    Part.weights: "weights: transposed, dequantised or quantised",
    Part.head: "head",
    Part.loss: "loss",
    Part.zero_gradients: "gradients set to zero",
    Part.gradient_norm: "norm of the gradients",
    Part.adamw: "AdamW",
    Part.unnamed: "kernels in no range",
    Part.communication: "communication, not overlapped",
    Part.copies: "copies between host and device, not overlapped",
    Part.gap: "nothing runs: the host is waited for",
}
"""How a table names them."""
ATTENTION = (Part.attention, Part.scores, Part.softmax, Part.values)
"""The first one where a kernel does all of it, the others where it is not fused."""
MLP = (Part.fc1, Part.activation, Part.fc2)
NOT_COMPUTED = (Part.communication, Part.copies, Part.gap)
"""Rows that are not kernels which compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """A part in a phase, in milliseconds a step."""

    phase: Phase
    part: Part
    time_ms: float
    """Of the step: the rows of a table add up to it. What runs at the same time is counted once."""
    gemm_ms: float
    """Of time_ms, in matrix products; those inside fused attention are not counted."""
    busy_ms: float
    """In which any of its kernels runs, on whatever stream and hidden or not."""
    launches: float
    """Kernels; on a CPU, operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """The mean of some profiled steps of one rank."""

    device: str
    """cuda or cpu."""
    num_steps: int
    step_ms: float
    is_eager: bool
    """Whether the host launched every kernel although the run replays a CUDA graph, whose kernels have no names."""
    rows: list[TimeRow]


def plain(times: ModuleTimes) -> dict[str, Any]:
    """Return what JSON holds; numbers are rounded to a nanosecond."""
    raw: dict[str, Any] = codec.plain(times)
    for row in (raw, *raw["rows"]):
        row.update({name: round(value, 6) for name, value in row.items() if isinstance(value, float)})
    return raw


def found(raw: Any) -> ModuleTimes | None:
    """Return the table that `plain` was made of; None where there is none, or a damaged one."""
    try:
        times = codec.typed(ModuleTimes, raw)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return times if times.step_ms > 0 else None
