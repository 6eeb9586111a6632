"""The registry of all rules, by ID: their texts, and the signs by which they are recognised in a log."""

from dataclasses import dataclass

from bench.rules import cluster, hosts, kubernetes, mlperf, ray, run, serving, signs
from bench.rules.signs import Sign


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong."""

    id: str
    title: str
    """What is wrong, in one line."""
    fix: str
    """What to do about it."""
    signs: tuple[Sign, ...] = ()
    """What it leaves in a log."""


_TEXTS = cluster.PYXIS | cluster.SLURM | cluster.ENROOT | cluster.MPI | cluster.NCCL | cluster.HARDWARE
_TEXTS |= hosts.HOSTS | kubernetes.KUBERNETES | ray.RAY | run.CONFIG | run.RUN
_TEXTS |= serving.SERVING | mlperf.LOG | mlperf.SCORE

RULES: dict[str, Rule] = {
    id: Rule(id, title, fix, tuple(sign for sign in signs.SIGNS if sign.rule == id))
    for id, (title, fix) in _TEXTS.items()
}
