"""What any kind of task measures, as one list of numbers with units."""

from pathlib import Path

from bench.mlperf import result as results
from bench.mlperf.result import Result
from bench.results import kernels
from bench.results.hardware import clocks_apart, hardware_facts, of_telemetry
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
    if isinstance(found, KernelsResult):
        return of_kernels(found)
    if isinstance(found, Result):
        return of_training(found)
    result, of_log = results.parse(found), kernels.of_file(found)
    if of_log is None:
        return of_training(result)
    return of_kernels(of_log) + tuple(of_telemetry(result.telemetry) if result.telemetry else ())
