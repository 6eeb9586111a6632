"""What each rule leaves in a log: texts of PyTorch, NCCL, Lightning, megatron-core, Slurm, Pyxis, Enroot and ours.

A pattern is searched in one line (in a few thousand bytes of a longer one) without its escape sequences. It matches
only what a failure prints.
Where several fit one line, the first one listed wins.
"""

from dataclasses import dataclass
from enum import IntEnum

from bench.rules import signs_of_cluster, signs_of_hosts, signs_of_ray, signs_of_training
from bench.rules.signs_of_ends import DEATHS, ECHOES, ENDS, HINTS


class Weight(IntEnum):
    """How much a sign explains: a higher one wins wherever it stands, then the earlier one."""

    HINT = 1
    """Runs that are fine print it too: it counts in a run that failed, where nothing else does."""
    OUTCOME = 2
    """What the MLPerf records say of how it went; `bench.diagnosis.trial_state` finds these."""
    END = 3
    """How a run was ended, whatever the reason."""
    ECHO = 4
    """What ranks say when another one is gone."""
    DEATH = 5
    """A rank that died without a word of its own."""
    CAUSE = 6
    """It names what is at fault."""


EVENTS = (Weight.END, Weight.ECHO, Weight.DEATH)
"""Each can follow from another one: within a file the first explains the rest."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One way in which a rule shows."""

    rule: str
    weight: Weight
    pattern: bytes


_FAMILIES = {
    Weight.CAUSE: signs_of_cluster.CAUSES | signs_of_hosts.CAUSES | signs_of_ray.CAUSES | signs_of_training.CAUSES,
    Weight.DEATH: DEATHS,
    Weight.ECHO: ECHOES,
    Weight.END: ENDS,
    Weight.HINT: HINTS,
}
SIGNS: tuple[Sign, ...] = tuple(
    Sign(rule, weight, pattern)
    for weight, family in _FAMILIES.items()
    for rule, patterns in family.items()
    for pattern in patterns
)
