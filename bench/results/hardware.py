"""What the GPUs did while a trial ran, as measurements and as facts by which two runs are told apart."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from bench.mlperf.result import Result
from bench.mlperf.speed import spread
from bench.mlperf.telemetry import Telemetry
from bench.results.measurement import Measurement

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
