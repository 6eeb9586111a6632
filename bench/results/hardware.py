"""What the GPUs did while a trial ran, as measurements and as facts by which two runs are told apart."""

from collections.abc import Iterator, Mapping

from bench.mlperf.result import Result
from bench.mlperf.speed import spread
from bench.mlperf.telemetry import Telemetry
from bench.results.measurement import Measurement

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
"""Clocks and limits that are no farther apart count as the same; it is the margin of comparisons."""
_EFFECT = "median power (W)"
"""At the same clocks another program takes another power: that is no other machine."""


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


def hardware_facts(result: Result) -> Mapping[str, float]:
    """Return what two runs on the same machine have in common, by title with unit; empty where nobody looked."""
    t = result.telemetry
    if t is None:
        return {}
    facts = {
        "median SM clock (MHz)": t.median("sm_clock_mhz"),
        "median memory clock (MHz)": t.median("memory_clock_mhz"),
        "power limit (W)": t.power_limit_w,
        _EFFECT: t.median("power_w"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def not_the_same_machine(first: Result, second: Result) -> tuple[str, ...]:
    """Return how the GPUs of two runs were run differently: other clocks, or another power limit. Empty: alike."""
    one, other = hardware_facts(first), hardware_facts(second)
    return tuple(
        f"{name} {one[name]:,.0f} and {other[name]:,.0f} ({other[name] / one[name] - 1:+.1%})"
        for name in one
        if name in other and name != _EFFECT and one[name] > 0 and abs(other[name] / one[name] - 1) > TOLERANCE
    )
