"""Judge the facts that ranks collected on their nodes before the first trial: facts/ and health.json in, findings out.

`jobs.node_checks` writes the files and `load` reads them, by the types of `bench.contract.node_facts`. `ranks` judges
the ranks, `hardware` the GPUs and networks, and `clocks` the clocks.
"""

from dataclasses import replace

from bench.contract.plan import Plan
from bench.preflight.nodes import clocks, hardware, ranks
from bench.preflight.nodes.load import Facts, check_result, load
from bench.rules.check import Finding

__all__ = ["Facts", "check_result", "judge", "load", "slow_nodes"]

CHECKS = (
    *(ranks.world, ranks.image, ranks.versions, ranks.environment, ranks.paths, ranks.results),
    *(hardware.gpus, hardware.gpu_faults, hardware.drivers, hardware.interfaces, hardware.infiniband, hardware.memlock),
    *(clocks.clocks, ranks.health),
)


def judge(plan: Plan, facts: Facts) -> list[Finding]:
    """Return all problems. If the facts of all ranks are missing, this is the only one."""
    return [replace(finding, tier="nodes") for check in CHECKS for finding in check(plan, facts)]


def slow_nodes(facts: Facts) -> list[str]:
    """Return the nodes that were measured to be slow, for --exclude; empty if slow nodes cannot be identified."""
    return list(facts.health.slow_nodes) if facts.health else []
