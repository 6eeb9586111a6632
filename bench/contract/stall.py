"""When a rank that shows no progress counts as stalled: by the run's own times, never by a fixed number of minutes."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class Stall:
    """A step or an evaluation ends the trial when it takes `factor` times as long as usual, and floor_s at least."""

    factor: float = 20
    floor_s: float = 120

    @property
    def grace_s(self) -> float:
        """How long the ranks wait for each other's reports; half of it between two looks for them."""
        return self.floor_s / 2

    def limit_s(self, usual_s: float) -> float:
        """Return how long something may take that usually takes usual_s."""
        return max(self.floor_s, self.factor * usual_s)
