"""Signs: log patterns of each rule, from PyTorch, NCCL, Lightning, megatron-core, Slurm, Pyxis, Enroot and runstop.

A pattern is searched in one line without its escape sequences (in a few thousand bytes of a long line). It matches only
what a failure prints. If several patterns match a line, the first one listed wins.
"""

from dataclasses import dataclass
from enum import IntEnum

from bench.rules import (
    signs_of_cluster,
    signs_of_hosts,
    signs_of_pods,
    signs_of_ray,
    signs_of_serving,
    signs_of_training,
)
from bench.rules.signs_of_ends import CRASHES, DEATHS, ECHOES, ENDS, HINTS


class Weight(IntEnum):
    """How much a sign explains: the highest weight wins, then the earliest line."""

    HINT = 1
    """Successful runs print it too: it counts only in a failed run without another sign."""
    OUTCOME = 2
    """The outcome of the trial by its MLPerf records; `bench.diagnosis.trial_state` finds these."""
    END = 3
    """How a run ended, without the reason."""
    ECHO = 4
    """What ranks print after another rank has died."""
    DEATH = 5
    """A rank died and printed no reason."""
    CRASH = 6
    """A rank died in a way that neither another rank nor a launcher causes, such as a segmentation fault."""
    CAUSE = 7
    """It names the cause."""


EVENTS = (Weight.END, Weight.ECHO, Weight.DEATH)
"""One can be the consequence of another: within a file the first one explains the rest."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One log pattern of a rule."""

    rule: str
    weight: Weight
    pattern: bytes


_FAMILIES = {
    Weight.CAUSE: signs_of_cluster.CAUSES
    | signs_of_hosts.CAUSES
    | signs_of_pods.CAUSES
    | signs_of_ray.CAUSES
    | signs_of_serving.CAUSES
    | signs_of_training.CAUSES,
    Weight.CRASH: signs_of_pods.CRASHES | CRASHES,
    Weight.DEATH: signs_of_pods.DEATHS | signs_of_ray.DEATHS | DEATHS,
    Weight.ECHO: signs_of_serving.ECHOES | ECHOES,
    Weight.END: ENDS,
    Weight.HINT: HINTS,
}
SIGNS: tuple[Sign, ...] = tuple(
    Sign(rule, weight, pattern)
    for weight, family in _FAMILIES.items()
    for rule, patterns in family.items()
    for pattern in patterns
)
