"""One measured number: its name, its unit, its value, and how far its repetitions lie apart."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.mlperf.result import Result
from bench.mlperf.speed import spread
from bench.mlperf.telemetry import Telemetry


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


NOTHING_MEASURED = "the log does not prove that anything was measured"
"""The problem of a trial that measured nothing, and misses nothing either."""
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


Measurements = Mapping[str, Measurement]
"""Of one run, by name."""
_MEDIANS = (
    ("gpu_power", "W", "power_w"),
    ("sm_clock", "MHz", "sm_clock_mhz"),
    ("memory_clock", "MHz", "memory_clock_mhz"),
    ("gpu_temperature", "°C", "temperature_c"),
)
_PEAKS = (
    ("peak_gpu_power", "W", "power_w"),
    ("peak_sm_clock", "MHz", "sm_clock_mhz"),
    ("peak_gpu_temperature", "°C", "temperature_c"),
    ("peak_gpu_memory_used", "GiB", "memory_gib"),
)
TOLERANCE = 0.02
"""Clocks that are no farther apart count as the same; it is the margin of comparisons."""
_CLOCKS = {"sm_clock": "median SM clock (MHz)", "memory_clock": "median memory clock (MHz)"}


def of_telemetry(telemetry: Telemetry) -> Iterator[Measurement]:
    """Yield medians over GPUs of their medians, the highest of peaks, shares of time, and the energy of all GPUs."""
    n = telemetry.num_gpus
    for name, unit, quantity in _MEDIANS:
        if (found := spread([level.median for level in telemetry.levels(quantity)])) is not None:
            yield Measurement(name=name, unit=unit, value=found.median, n=n, p10=found.p10, p90=found.p90)
    shares = {f"throttle_{name.replace(' ', '_')}": share for name, share in telemetry.throttle.items()}
    for name, unit, value in (
        *((name, unit, telemetry.peak(quantity)) for name, unit, quantity in _PEAKS),
        *((name, "", share) for name, share in shares.items()),
        ("energy", "J", telemetry.energy_j),
        ("energy_per_step", "J", telemetry.energy_per_step_j),
        ("energy_per_token", "J", telemetry.energy_per_token_j),
    ):
        if value is not None:
            yield Measurement(name=name, unit=unit, value=value, n=n)


def hardware_facts(result: Result) -> dict[str, str]:
    """Return how the GPUs of a trial were set up, by title with unit; empty where nobody looked."""
    limit_w = result.telemetry and result.telemetry.power_limit_w
    return {"GPU power limit (W)": f"{limit_w:.0f}"} if limit_w else {}


def clocks_apart(first: Sequence[Measurements], second: Sequence[Measurements]) -> Iterator[tuple[str, str, str]]:
    """Yield the clocks at which the runs of two systems differ by more than TOLERANCE: the title and both clocks.

    Runs at different clocks are not those of one machine. Power does not count: it follows from what is run.
    """
    for name, title in _CLOCKS.items():
        one, other = (median([run[name].value for run in runs if name in run] or [0.0]) for runs in (first, second))
        if min(one, other) > 0 and max(one, other) / min(one, other) > 1 + TOLERANCE:
            yield title, f"{one:.0f}", f"{other:.0f}"


HARDWARE = (
    *("gpu_power", "sm_clock", "memory_clock", "gpu_temperature", "peak_gpu_power", "peak_sm_clock"),
    *("peak_gpu_temperature", "peak_gpu_memory_used", "energy", "energy_per_step", "energy_per_token"),
)
"""The names of what telemetry measures, whatever the task."""
