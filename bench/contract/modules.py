"""Types of the step time breakdown by phase and module, which a profile fills in."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bench.contract import codec


class Phase(StrEnum):
    """Phase of a step."""

    forward = "forward"
    backward = "backward"
    """Includes the reduction of gradients over replicas."""
    recomputation = "recomputation"
    """Forward passes of layers or linears that run again inside the backward pass (`recipe.recompute`)."""
    optimizer = "optimizer"
    other = "other"
    """Time between the other phases."""


class Part(StrEnum):
    """A module of the model, a part of the optimizer step, or one of the last four rows."""

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
    Part.input: "copy of the rows to the device",
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
    Part.weights: "weights: transpose, dequantize or quantize",
    Part.head: "head",
    Part.loss: "loss",
    Part.zero_gradients: "gradients set to zero",
    Part.gradient_norm: "norm of the gradients",
    Part.adamw: "AdamW",
    Part.unnamed: "kernels outside of named ranges",
    Part.communication: "communication, not overlapped",
    Part.copies: "copies between host and device, not overlapped",
    Part.gap: "idle: waiting for the host",
}
"""Row labels of a table."""
ATTENTION = (Part.attention, Part.scores, Part.softmax, Part.values)
"""The first one if attention is fused, the others if not."""
MLP = (Part.fc1, Part.activation, Part.fc2)
NOT_COMPUTED = (Part.communication, Part.copies, Part.gap)
"""Rows that are not compute kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """Time of a part in a phase, in milliseconds per step."""

    phase: Phase
    part: Part
    time_ms: float
    """The time of this row. All rows add up to the step time, because concurrent kernels are counted once."""
    gemm_ms: float
    """Part of time_ms in GEMMs, without those inside fused attention."""
    busy_ms: float
    """Time during which any kernel of this part runs on any stream, overlapped or not."""
    launches: float
    """Kernel launches; on a CPU, operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTimes:
    """The mean times of the profiled steps of one rank."""

    device: str
    """cuda or cpu."""
    num_steps: int
    step_ms: float
    is_eager: bool
    """Whether the profiled steps ran without CUDA graphs. The reason is that kernels of a CUDA graph have no names."""
    rows: list[TimeRow]
    num_layers: int | None = field(default=None, metadata=codec.OMIT_DEFAULT)
    """The number of transformer layers of this rank. None in profiles of earlier versions."""


def plain(times: ModuleTimes) -> dict[str, Any]:
    """Return the JSON data; times are rounded to a nanosecond."""
    raw: dict[str, Any] = codec.plain(times)
    for row in (raw, *raw["rows"]):
        row.update({name: round(value, 6) for name, value in row.items() if isinstance(value, float)})
    return raw


def parsed(raw: Any) -> ModuleTimes | None:
    """Return the table from `plain`; None if it is missing or damaged."""
    try:
        times = codec.typed(ModuleTimes, raw)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return times if times.step_ms > 0 else None
