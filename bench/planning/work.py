"""The seconds of a part of a step, by kind of work."""

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
        return Work(
            gemm_s=self.gemm_s + other.gemm_s,
            attention_s=self.attention_s + other.attention_s,
            elementwise_s=self.elementwise_s + other.elementwise_s,
            communication_s=self.communication_s + other.communication_s,
        )

    def __mul__(self, count: float) -> "Work":
        return Work(
            gemm_s=count * self.gemm_s,
            attention_s=count * self.attention_s,
            elementwise_s=count * self.elementwise_s,
            communication_s=count * self.communication_s,
        )
