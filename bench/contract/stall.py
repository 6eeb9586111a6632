"""Stall detection: a rank without progress is compared with the run's own step times, not with a fixed timeout."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Stall:
    """End a trial if a step or an evaluation takes `factor` times its usual time, and at least floor_s."""

    factor: float = 20
    floor_s: float = 120

    @property
    def grace_s(self) -> float:
        """How long ranks wait for each other's reports; they poll at half of this interval."""
        return self.floor_s / 2

    def limit_s(self, usual_s: float) -> float:
        """Return the time limit for something that usually takes usual_s."""
        return max(self.floor_s, self.factor * usual_s)
