"""What any kind of task measures, as one list of numbers with units."""

from pathlib import Path

from bench.mlperf import result as results
from bench.mlperf.result import Result
from bench.results import kernels
from bench.results.hardware import clocks_apart, hardware_facts
from bench.results.kernels import KernelsResult, of_kernels
from bench.results.measurement import Measurement
from bench.results.training import of_training

__all__ = [
    "KernelsResult",
    "Measurement",
    "clocks_apart",
    "hardware_facts",
    "of",
    "of_kernels",
    "of_training",
]


def of(found: Path | Result | KernelsResult) -> tuple[Measurement, ...]:
    """Return what a trial measured, by the kind of its task; of a log, or of what was read from one.

    Raises:
        LogError: the log cannot be opened.
    """
    if isinstance(found, Path):
        of_log = kernels.of_file(found)
        found = results.parse(found) if of_log is None else of_log
    return of_kernels(found) if isinstance(found, KernelsResult) else of_training(found)
