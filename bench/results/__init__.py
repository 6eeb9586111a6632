"""What any kind of task measures, as one list of numbers with units."""

from pathlib import Path

from bench.mlperf import log as logs
from bench.mlperf import reader
from bench.mlperf import result as results
from bench.mlperf.log import Log
from bench.mlperf.result import Result
from bench.results import generation, kernels, serving
from bench.results.generation import GenerationResult, of_generation
from bench.results.hardware import clocks_apart, hardware_facts
from bench.results.kernels import KernelsResult, of_kernels
from bench.results.measurement import Measurement
from bench.results.serving import ServingResult, of_serving
from bench.results.training import of_training

__all__ = [
    "GenerationResult",
    "KernelsResult",
    "Measurement",
    "ServingResult",
    "clocks_apart",
    "hardware_facts",
    "of",
    "of_generation",
    "of_kernels",
    "of_kind",
    "of_serving",
    "of_training",
    "read",
]


def of(found: Path | Result | GenerationResult | KernelsResult | ServingResult) -> tuple[Measurement, ...]:
    """Return what a trial measured, by the kind of its task; of a log, or of what was read from one.

    Raises:
        LogError: the log cannot be opened.
    """
    if isinstance(found, KernelsResult):
        return of_kernels(found)
    if isinstance(found, GenerationResult):
        return of_generation(found)
    if isinstance(found, ServingResult):
        return of_serving(found)
    if isinstance(found, Result):
        return of_training(found)
    return read(found)[1]


def read(path: Path) -> tuple[Result, tuple[Measurement, ...]]:
    """Return what a log proves, and what its trial measured.

    Raises:
        LogError: the log cannot be opened.
    """
    log = logs.read(path)
    result = results.result(log, str(path), reader.system(path))
    return result, of(of_kind(log) or result)


def of_kind(log: Log) -> KernelsResult | GenerationResult | ServingResult | None:
    """Return what a log says of kernels, generation or serving; None for one of training."""
    return kernels.read(log) or generation.read(log) or serving.read(log)
