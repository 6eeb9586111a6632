"""Settings and estimate of local SGD: groups of ranks take H inner steps each, and then average their weights."""

from dataclasses import dataclass, field
from enum import Enum

from bench.contract.codec import OMIT_DEFAULT


class Average(Enum):
    """How the weights of the groups are averaged.

    parameters: the mean of the weights (local SGD).
    nesterov: an outer step of SGD with Nesterov momentum on the mean change of the weights (DiLoCo).
    """

    parameters = "parameters"
    nesterov = "nesterov"


class Compress(Enum):
    """The format in which weights are sent between groups; int8 has one scale for each SCALED numbers."""

    none = "none"
    bf16 = "bf16"
    int8 = "int8"


SCALED = 256
"""Numbers that share one FP32 scale."""
BYTES = {Compress.none: 4.0, Compress.bf16: 2.0, Compress.int8: 1 + 4 / SCALED}
"""Bytes sent per number."""


@dataclass(slots=True, kw_only=True)
class LocalSgd:
    """The groups of parallel.groups take `every_steps` inner steps each, and then their weights are averaged.

    Source: Stich 2019, Local SGD, arXiv 1805.09767; Douillard et al. 2023, DiLoCo, arXiv 2311.08105.
    """

    every_steps: int | None = None
    """H, the inner steps between two weight averagings. Weights are always averaged after the last step. None: no local
    SGD, and every step sums the gradients of all ranks."""
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    average: Average = Average.parameters
    compress: Compress = Compress.none
    overlap_steps: int = 0
    """Inner steps that run while the weights are exchanged; the average is applied after them. 0: training waits."""
    time_limit_s: float = 300.0
    """How long the other groups wait for a group before they continue without it."""
    restarts: int | None = field(default=None, metadata=OMIT_DEFAULT)
    """How often a failed group is restarted; it rejoins at the next weight averaging. None: never."""
    step_time_s: float | None = None
    """Measured time of an inner step, for the plan's estimates; None: the plan's own estimate."""

    @property
    def interval(self) -> int:
        """H; only with local SGD."""
        assert self.every_steps is not None
        return self.every_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The estimated cost and gain of local SGD; None where the network or the step time is not known."""

    num_averagings: int
    rank_bytes: float
    """Sent by one rank in one weight averaging."""
    exchange_s: float | None
    """Of one weight averaging, from cluster.network_gbs alone, without compressing and copying."""
    step_s: float | None
    """Time of an inner step."""
    efficiency: float | None
    """Time of the inner steps over the time of inner steps and weight averagings."""
    synchronous_step_s: float | None
    """Time of a synchronous step of the same global batch over the same network."""
    break_even_one_group: float | None
    """Break-even H with a single group that trains on the whole batch: below it, local SGD is slower."""
    break_even_synchronous: float | None
    """Break-even H with synchronous training: below it, local SGD is slower."""

    @property
    def mean_step_s(self) -> float | None:
        """Time of an inner step with its share of the weight averaging."""
        return self.step_s / self.efficiency if self.step_s and self.efficiency else None
