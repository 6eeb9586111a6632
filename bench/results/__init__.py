"""What any kind of task measures, as one list of numbers with units."""

from bench.results.measurement import Measurement
from bench.results.training import of_training

__all__ = ["Measurement", "of_training"]
