"""Training apart: groups of ranks take steps of their own, and are merged every H of them. What a recipe says of it."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT


class Average(Enum):
    """What a merge makes of the groups' weights.

    parameters: their mean (local SGD).
    nesterov: an outer step of SGD with Nesterov's momentum on the mean of what the groups have changed (DiLoCo).
    """

    parameters = "parameters"
    nesterov = "nesterov"


class Compress(Enum):
    """How numbers cross the network in a merge; int8 has one scale for each SCALED numbers."""

    none = "none"
    bf16 = "bf16"
    int8 = "int8"


SCALED = 256
"""So many numbers share a scale in FP32."""
BYTES = {Compress.none: 4.0, Compress.bf16: 2.0, Compress.int8: 1 + 4 / SCALED}
"""Per number that crosses the network."""


@dataclass(slots=True, kw_only=True)
class LocalSgd:
    """Groups of parallel.groups train apart for `every_steps` steps, and then their weights are merged.

    Source: Stich 2019, Local SGD, arXiv 1805.09767; Douillard et al. 2023, DiLoCo, arXiv 2311.08105.
    """

    every_steps: int | None = None
    """H. The last step always merges, so that as many as the run has steps merge once, at its end. None: no local SGD,
    every step sums the gradients of all ranks."""
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    average: Average = Average.parameters
    compress: Compress = Compress.none
    overlap_steps: int = 0
    """How many inner steps go on while a merge crosses the network; its result is then applied. 0: training waits."""
    time_limit_s: float = 300.0
    """How long the others wait for a group at a merge, and then go on without it."""
    restarts: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """How often a group whose processes have ended is started again, to join at the next merge. None: never."""
    step_time_s: float | None = None
    """Of a group's inner step, as measured, for the plan's estimates; None: the plan's own estimate."""

    @property
    def interval(self) -> int:
        """H, where there is local SGD."""
        assert self.every_steps is not None
        return self.every_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What training apart costs and gains by arithmetic; None where the network or the step time is not known."""

    num_merges: int
    rank_bytes: float
    """What one rank sends in a merge."""
    exchange_s: float | None
    """Of a merge, by cluster.network_gbs alone: compressing and copying are not counted."""
    step_s: float | None
    """Of a group's inner step."""
    efficiency: float | None
    """The time of the inner steps over that of the run, its merges included."""
    synchronous_step_s: float | None
    """Of a step of the same batch without groups, whose gradients cross the same network."""
    even_with_one_group: float | None
    """The H below which all groups together are slower than one of them that trains on the whole batch alone."""
    even_with_synchronous: float | None
    """The H below which they are slower than synchronous training."""

    @property
    def mean_step_s(self) -> float | None:
        """The time of a step with its share of a merge."""
        return self.step_s / self.efficiency if self.step_s and self.efficiency else None
