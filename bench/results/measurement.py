"""One measured number: its name, its unit, its value, and how far its repetitions lie apart."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A number that a trial measured. What was not measured has no Measurement."""

    name: str
    unit: str
    """In SI units and bytes; empty for a count or a share."""
    value: float
    n: int = 1
    """How many repetitions the value stands for."""
    p10: float | None = None
    p90: float | None = None
    """A tenth of the repetitions lies below the one, a tenth above the other; None where there is one number only."""


MAIN = ("throughput_per_gpu", "throughput", "generation_throughput", "step_time")
"""What a trial is compared by, the first one that it has."""
BEST = "best "
"""Begins the name of the best rate of a kernel: these are what kernels are compared by."""
_OF_A_LOAD = ("output_throughput", "latency_p50")
"""What a serving load is judged by. Where requests arrive at a rate, only the latency shows a slower server."""


def main(measured: Mapping[str, Measurement]) -> list[Measurement]:
    """Return what a trial is judged by: its main measurement, else those of each kernel or of each serving load."""
    first = [measured[name] for name in MAIN if name in measured][:1]
    return first or [
        one for name, one in measured.items() if name.startswith(BEST) or name.rpartition(" ")[2] in _OF_A_LOAD
    ]


def higher_is_better(measurement: Measurement) -> bool:
    """Return whether more of it is better, as of rates, clocks and efficiencies. Of times and sizes less is."""
    return is_rate(measurement.unit) or measurement.unit == "MHz" or measurement.name in _EFFICIENCIES


def is_rate(unit: str) -> bool:
    """Return whether a unit is something per second, such as tokens/s/GPU."""
    return "/s/" in f"{unit}/"


_EFFICIENCIES = (
    *("mfu", "bandwidth_share", "efficiency_apart"),
    *("gemm_share", "gemm_share_forward", "gemm_share_backward", "gemm_share_optimizer"),
)
"""Shares of a peak, and of time that was spent on what is wanted."""
