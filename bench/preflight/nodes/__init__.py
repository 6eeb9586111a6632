"""What the ranks found on their nodes before the first trial, and what is wrong with it: facts/ and health.json in, findings out.

`jobs.node_checks.facts` and `jobs.node_checks.health` write them; `facts` reads them, `ranks` judges the ranks, `hardware` what the nodes are made of.
"""

from dataclasses import replace

from bench.contract.plan import Plan
from bench.preflight.nodes import hardware, ranks
from bench.preflight.nodes.load import Facts, load
from bench.rules.check import Finding

__all__ = ["Facts", "judge", "load", "slow_nodes"]

CHECKS = (
    *(ranks.world, ranks.image, ranks.versions, ranks.environment, ranks.paths, ranks.results, ranks.clocks),
    *(hardware.gpus, hardware.gpu_faults, hardware.drivers, hardware.interfaces, hardware.infiniband, hardware.memlock),
    ranks.health,
)


def judge(plan: Plan, facts: Facts) -> list[Finding]:
    """Return everything that is wrong. Without facts of any rank nothing but that is."""
    found = (finding for check in CHECKS for finding in check(plan, facts))
    return [replace(finding, tier="nodes") for finding in found]


def slow_nodes(facts: Facts) -> list[str]:
    """Return the nodes that jobs.node_checks.health found to be slow, for --exclude; empty if none, or nobody can tell which."""
    return list(facts.health.slow_nodes) if facts.health else []
