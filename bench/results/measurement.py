"""A measurement: name, unit, value, and the spread over its repetitions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bench.mlperf.result import Result
from bench.mlperf.speed import spread
from bench.mlperf.telemetry import Telemetry


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured number of a trial."""

    name: str
    unit: str
    """The unit. Empty for counts and shares."""
    value: float
    n: int = 1
    """The number of repetitions."""
    p10: float | None = None
    """The 10th percentile over the repetitions."""
    p90: float | None = None
    """The 90th percentile over the repetitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The time of each request of a trial, in seconds."""

    title: str
    """What the times are, such as `Latency (burst)`."""
    axis: str
    """The label of an axis of these times."""
    values: tuple[float, ...]
    """Of the requests that were answered."""
    total: int
    """The number of all requests."""

    def with_more(self, other: "Distribution") -> "Distribution":
        """Return the distribution of the requests of both."""
        return replace(self, values=(*self.values, *other.values), total=self.total + other.total)


NOTHING_MEASURED = "the log has no measurement"
"""The problem of a trial without measurements."""
MAIN = ("throughput_per_gpu", "throughput", "generation_throughput", "step_time")
"""The main measurements, by priority: a trial is compared by the first one that it has."""
BEST = "best "
"""The prefix of the best rate of a kernel, by which kernels are compared."""
SHARE_OF_PEAK = " share of peak"
"""The end of the name of a kernel's rate divided by the peak of the data sheet."""
_OF_A_LOAD = ("output_throughput", "latency_p50")
"""The main measurements of a serving load. At a fixed request rate only the latency shows a slower server."""


def main(measured: Mapping[str, Measurement]) -> list[Measurement]:
    """Return the main measurement of a trial, or those of each kernel or serving load."""
    first = [measured[name] for name in MAIN if name in measured][:1]
    return first or [
        one for name, one in measured.items() if name.startswith(BEST) or name.rpartition(" ")[2] in _OF_A_LOAD
    ]


def higher_is_better(measurement: Measurement) -> bool:
    """Return whether higher is better: of rates, clocks and efficiencies, but not of times and sizes."""
    is_share_of_peak = measurement.name.endswith(SHARE_OF_PEAK)
    return (
        is_rate(measurement.unit) or measurement.unit == "MHz" or measurement.name in _EFFICIENCIES or is_share_of_peak
    )


def is_rate(unit: str) -> bool:
    """Return whether a unit is per second, such as tokens/s/GPU."""
    return "/s/" in f"{unit}/"


_EFFICIENCIES = (
    *("mfu", "bandwidth_share", "efficiency_local_sgd"),
    *("gemm_share", "gemm_share_forward", "gemm_share_backward", "gemm_share_optimizer"),
    *("gemm_share_recomputation", "gemm_share_backward_with_recomputation", "scaling_efficiency"),
)
"""Shares of a peak, and of time spent on useful work."""


Measurements = Mapping[str, Measurement]
"""The measurements of one run by name."""
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
"""Clocks that differ by less count as equal; it is also the default margin of comparisons."""
_CLOCKS = {"sm_clock": "median SM clock (MHz)", "memory_clock": "median memory clock (MHz)"}


def of_telemetry(telemetry: Telemetry) -> Iterator[Measurement]:
    """Yield the median over GPUs of their medians, the highest peak, shares of time, and the energy of all GPUs."""
    n = telemetry.num_gpus
    for name, unit, quantity in _MEDIANS:
        if (over_gpus := spread([level.median for level in telemetry.levels(quantity)])) is not None:
            p10, p90 = over_gpus.p10, over_gpus.p90
            yield Measurement(name=name, unit=unit, value=over_gpus.median, n=n, p10=p10, p90=p90)
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


MACHINE_KEYS = ("accelerator", "num_ranks", "host_processor_model_name", "operating_system", "commit", "image")
"""Keys of a log that describe hardware and software; all others are settings."""


def hardware_facts(result: Result) -> dict[str, str]:
    """Return the GPU settings of a trial, by title with unit; empty without telemetry."""
    limit_w = result.telemetry and result.telemetry.power_limit_w
    return {"GPU power limit (W)": f"{limit_w:.0f}"} if limit_w else {}


def differing_clocks(first: Sequence[Measurements], second: Sequence[Measurements]) -> Iterator[tuple[str, str, str]]:
    """Yield the clocks of two systems that differ by more than TOLERANCE: the title and both clocks.

    Power is not compared, since it depends on the work.
    """
    for name, title in _CLOCKS.items():
        one, other = (median([run[name].value for run in runs if name in run] or [0.0]) for runs in (first, second))
        if min(one, other) > 0 and max(one, other) / min(one, other) > 1 + TOLERANCE:
            yield title, f"{one:.0f}", f"{other:.0f}"


HARDWARE = (
    *("gpu_power", "sm_clock", "memory_clock", "gpu_temperature", "peak_gpu_power", "peak_sm_clock"),
    *("peak_gpu_temperature", "peak_gpu_memory_used", "energy", "energy_per_step", "energy_per_token"),
)
"""The names of telemetry measurements, which every task may have."""
