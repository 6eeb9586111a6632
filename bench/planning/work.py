"""The seconds of a part of a step, by kind of work."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of one part of a step, by kind of work."""

    gemm_s: float = 0.0
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    communication_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.gemm_s + self.attention_s + self.elementwise_s + self.communication_s

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, count: float) -> "Work":
        return Work(*(count * seconds for seconds in dataclasses.astuple(self)))
