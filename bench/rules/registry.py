"""The registry of all rules, by ID: their texts, and the log patterns (signs) that identify them."""

from dataclasses import dataclass

from bench.rules import cluster, hosts, kubernetes, mlperf, ray, run, serving, signs
from bench.rules.signs import Sign


@dataclass(frozen=True, slots=True)
class Rule:
    """One known problem."""

    id: str
    title: str
    """What is wrong, in one line."""
    fix: str
    """How to fix it."""
    signs: tuple[Sign, ...] = ()
    """Its patterns in a log."""


_TEXTS = cluster.PYXIS | cluster.SLURM | cluster.ENROOT | cluster.MPI | cluster.NCCL | cluster.HARDWARE
_TEXTS |= hosts.HOSTS | kubernetes.KUBERNETES | ray.RAY | run.CONFIG | run.RUN
_TEXTS |= serving.SERVING | mlperf.LOG | mlperf.SCORE

RULES: dict[str, Rule] = {
    id: Rule(id, title, fix, tuple(sign for sign in signs.SIGNS if sign.rule == id))
    for id, (title, fix) in _TEXTS.items()
}
