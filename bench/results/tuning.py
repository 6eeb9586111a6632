"""The settings that `runstop tune` tries: their estimates, their measurements, and the best of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Settings with which a task fits into memory, and what the plan estimates of them."""

    rank: int
    """From 1, by the estimated step."""
    name: str
    overrides: tuple[str, ...]
    memory_gib: float
    capacity_gib: float | None
    """None: the device's memory is unknown."""
    step_ms: float | None
    """None: no step can be estimated, and the rank is that of the simpler settings."""
    low_ms: float | None
    high_ms: float | None
    """Where nine of ten measured steps would be."""


class Outcome(StrEnum):
    """What the measurements say about settings."""

    fastest = "fastest"
    slower = "slower"
    equivalent = "equivalent"
    """Its difference from the fastest is within the margin."""
    undecided = "undecided"
    failed = "failed"
    not_measured = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Settings and their measurements; values are None without enough runs."""

    candidate: Candidate
    outcome: Outcome
    values_ms: tuple[float, ...] = ()
    """The median step of each run, in the order of blocks."""
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    """The 95 % interval of the geometric mean over runs."""
    slower_percent: float | None = None
    """How much longer its step is than that of the fastest, over the blocks that both have."""
    slower_low: float | None = None
    slower_high: float | None = None
    """The interval of this, at the confidence by which settings are left out."""
    than: str = ""
    """The settings that it was compared with: the fastest ones at that time."""
    reason: str = ""
    """Why it was not measured, or failed."""
    runs: tuple[str, ...] = ()
    """The run folders, relative to the folder of the study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The result of `runstop tune`."""

    task: str
    cluster: str
    folder: str
    """The folder of the runs, which is that of a study; it does not exist before the first run."""
    num_candidates: int
    tried: tuple[Tried, ...]
    """Those to measure, in the order of the ranking; without measurements (--dry-run) all that fit."""
    best: str = ""
    """The name of the fastest; empty without measurements."""
    is_decided: bool = False
    """Whether all other settings are slower or equivalent, or have failed."""
    stopped_by: str = ""
    """Why no further runs started."""
    num_blocks: int = 0
    steps: int = 0
    """Steps of a run that are measured."""
    margin: float = 0.0
    confidence: float = 0.0
    """Of each interval by which settings are left out."""
    estimated_by: str = ""
    """What the intervals of the estimates are from."""
    overrides_file: str = ""
    commit: str = ""
    hardware: str = ""
    command: str = ""
    """The command that continues these measurements, with more blocks if these were used up."""

    @property
    def regret(self) -> float | None:
        """How much longer the step of the model's first choice is than that of the best; None if not both have one."""
        first = min(self.tried, key=lambda one: one.candidate.rank, default=None)
        best = self.settings(self.best)
        if first is None or best is None or first.median_ms is None or best.median_ms is None:
            return None
        return first.median_ms / best.median_ms - 1

    def settings(self, name: str) -> Tried | None:
        return next((one for one in self.tried if one.candidate.name == name), None)


def left(tried: Sequence[Tried]) -> list[str]:
    """Return the names of settings that are not separated from the fastest."""
    return [one.candidate.name for one in tried if one.outcome is Outcome.undecided]
