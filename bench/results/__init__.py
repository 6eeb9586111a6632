"""What any kind of task measures, as one list of numbers with units."""

from dataclasses import dataclass
from pathlib import Path

from bench.mlperf import log as logs
from bench.mlperf import reader
from bench.mlperf import result as results
from bench.mlperf.log import Log
from bench.mlperf.result import Result
from bench.results import generation, kernels, serving
from bench.results.generation import GenerationResult, of_generation
from bench.results.kernels import KernelsResult, of_kernels
from bench.results.measurement import Measurement, clocks_apart, hardware_facts
from bench.results.serving import ServingResult, of_serving
from bench.results.training import of_training

__all__ = [
    "GenerationResult",
    "KernelsResult",
    "Measurement",
    "Read",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What the log of a trial holds."""

    log: Log
    result: Result
    of_kind: KernelsResult | GenerationResult | ServingResult | None
    """What it says of kernels, generation or serving; None for one of training."""
    measurements: tuple[Measurement, ...]

    @property
    def unproven(self) -> str:
        """Why the log does not prove what it says was asked for; empty where it does."""
        if self.result.valid and (self.of_kind is None or self.of_kind.proven):
            return ""
        first = next(iter(self.of_kind.problems if self.of_kind is not None else ()), "")
        return f"not a valid trial: {first}" if first else "not a valid trial"


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
    return read(found).measurements


def read(path: Path) -> Read:
    """Return what a log holds: what it proves, and what its trial measured.

    Raises:
        LogError: the log cannot be opened.
    """
    log = logs.read(path)
    result, found = results.result(log, str(path), reader.system(path)), of_kind(log)
    return Read(log=log, result=result, of_kind=found, measurements=of(found or result))


def of_kind(log: Log) -> KernelsResult | GenerationResult | ServingResult | None:
    """Return what a log says of kernels, generation or serving; None for one of training."""
    return kernels.read(log) or generation.read(log) or serving.read(log)
