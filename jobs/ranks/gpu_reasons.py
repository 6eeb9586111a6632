"""What telemetry shows about a slow GPU: a reduced clock and its reason, power, temperature, PCIe lanes, ECC errors.

The samples of all nodes are in the run folder (`jobs.ranks.telemetry`). Standard library only.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from pathlib import Path
from statistics import median

from bench.contract import run_files, telemetry
from bench.contract.telemetry import Sample

HARMLESS = ("idle", "clocks setting")
"""Reasons for a reduced clock that do not make a GPU slower than the others, or that a user has set."""
LOW_CLOCK, LOW_POWER, HOTTER_C = 0.97, 0.85, 10.0
"""Shares of the other GPUs' median clock and power, and degrees above their median temperature, that are reported."""


def find(folder: Path, trial: int, node: str, local_ranks: Sequence[int]) -> tuple[str, ...]:
    """Return what the last samples of these GPUs of a node show; nothing without samples, as on CPUs."""
    files = sorted(folder.glob(run_files.telemetry(trial, "*")))
    own_file = folder / run_files.telemetry(trial, node)
    own: list[list[Sample]] = []
    others: list[list[Sample]] = []
    for path in files:
        with suppress(OSError):
            by_gpu: dict[int, list[Sample]] = {}
            for sample in telemetry.recent(path):
                by_gpu.setdefault(sample.gpu, []).append(sample)
            for place, (_, samples) in enumerate(sorted(by_gpu.items())):  # ranks use the GPUs of a node in order
                (own if path == own_file and place in local_ranks else others).append(samples)
    usual = [_usual(others, value) for _, _, value, _ in _COMPARED]
    elsewhere = [name for samples in others for name in _throttled(samples)]
    common = {name for name in elsewhere if 2 * elsewhere.count(name) > len(others)}
    return tuple(dict.fromkeys(reason for samples in own for reason in _of_gpu(samples, usual, common)))


def _throttled(samples: Sequence[Sample]) -> list[str]:
    """Return the reasons for a reduced clock in at least half of the samples."""
    active = [name for sample in samples for name in sample.throttle or () if name not in HARMLESS]
    return [name for name in dict.fromkeys(active) if 2 * active.count(name) >= len(samples)]


def _of_gpu(samples: Sequence[Sample], usual_values: Sequence[float | None], common: Set[str]) -> list[str]:
    """Return what a GPU shows; common: the reasons for a reduced clock that most others have too."""
    gpu = f"GPU {samples[0].gpu}"
    reasons = []
    if often := [name for name in _throttled(samples) if name not in common]:
        reasons.append(f"{gpu} throttled: {', '.join(often)}")
    for (text, unit, value, is_reported), usual in zip(_COMPARED, usual_values, strict=True):
        own = _middle(samples, value)
        if own is not None and usual is not None and is_reported(own, usual):
            reasons.append(f"{gpu} {text} {own:,.0f}{unit}, others {usual:,.0f}{unit}")
    errors = [sample.ecc_errors for sample in samples if sample.ecc_errors is not None]
    if errors and max(errors) > 0:
        reasons.append(f"{gpu} has {max(errors):,.0f} uncorrected ECC errors")
    return reasons


Value = Callable[[Sample], float | None]
_COMPARED: tuple[tuple[str, str, Value, Callable[[float, float], bool]], ...] = (
    ("SM clock", " MHz", lambda sample: sample.sm_clock_mhz, lambda own, usual: own < LOW_CLOCK * usual),
    ("power", " W", lambda sample: sample.power_w, lambda own, usual: own < LOW_POWER * usual),
    ("temperature", " °C", lambda sample: sample.temperature_c, lambda own, usual: own > usual + HOTTER_C),
    ("PCIe lanes", "", lambda sample: sample.pcie_lanes, lambda own, usual: own < usual),
)


def _middle(samples: Sequence[Sample], value: Value) -> float | None:
    known = [each for sample in samples if (each := value(sample)) is not None]
    return median(known) if known else None


def _usual(others: Sequence[Sequence[Sample]], value: Value) -> float | None:
    known = [each for samples in others if (each := _middle(samples, value)) is not None]
    return median(known) if known else None
