"""What any kind of task measures, as one list of numbers with units."""

from bench.results.hardware import hardware_facts, not_the_same_machine
from bench.results.measurement import Measurement
from bench.results.training import of_training

__all__ = ["Measurement", "hardware_facts", "not_the_same_machine", "of_training"]
