"""Measure nodes and their links, once per rank, before the first trial: `python -m jobs.node_checks.health PLAN`.

It measures all-reduce over all ranks and within each node, GEMMs and memory copies of every rank, and the offsets of
the nodes' clocks. If the all-reduce over all nodes is below its floor, `jobs.node_checks.search` finds what is slow.
Rank 0 writes health.json to the run folder. If a rate is below its floor in cluster.health, every rank fails.
"""

import argparse
import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.contract import node_facts, run_files, schema
from bench.contract.node_facts import AllReduceRate, Floors, HealthNode, RankRates
from bench.contract.plan import Plan, nodes_of_job, on_nodes
from bench.errors import BenchError, ConfigError
from jobs.node_checks import floors
from jobs.node_checks.facts import attempt, save
from jobs.ranks import guard, process_group
from jobs.ranks.identity import Rank, from_environment, node_name

if TYPE_CHECKING:
    import torch

    from jobs.node_checks.rates import Readings
from bench.contract import plan_kinds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.node_checks.health", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan.json of a run folder; health.json is written to the same folder")
    args = parser.parse_args()
    folder, who, began = args.plan.resolve().parent, from_environment(), time.monotonic()
    with guard.guarded(folder / run_files.rank_error(f"health{run_files.array_task()}", who.rank)):
        plan = with_spares(plan_kinds.load(args.plan), who)
        config = required_config(plan)
        from jobs.node_checks import rates

        device = process_group.join(plan, who, timeout_s=rates.MEETING_S)
        measured = measure(config, who, device)
        report = floors.judged(replace(measured, seconds=round(time.monotonic() - began, 1)))
        if who.rank == 0:
            save(report, folder / run_files.health(run_files.array_task()))
            print(floors.table(report))
        process_group.shut_down()
        require(report)


def with_spares(plan: Plan, who: Rank) -> Plan:
    """Return the plan for all nodes that were started: those that its trials need, and up to cluster.spare_nodes."""
    num_nodes = who.world_size // plan.world.ranks_per_node
    return on_nodes(plan, num_nodes) if plan.world.num_nodes <= num_nodes <= nodes_of_job(plan) else plan


def required_config(plan: Plan) -> schema.Health:
    """Return cluster.health.

    Raises:
        ConfigError: it is not set.
    """
    cluster = plan.config.cluster
    if cluster.health is None:
        raise ConfigError(
            f"the config of cluster {cluster.name} sets no minimum speeds, which the node check needs",
            where="cluster.health",
            fix=f"add the block cluster.health to conf/cluster/{cluster.name}.yaml",
        )
    return cluster.health


def measure(config: schema.Health, who: Rank, device: "torch.device") -> node_facts.Health:
    """Return all measurements, equal on every rank; without a verdict, and with seconds = 0."""
    from jobs.node_checks import rates

    node, nodes = node_name(), dict[str, list[int]]()
    for rank, name in enumerate(rates.gathered(node)):
        nodes.setdefault(name, []).append(rank)
    together = rates.allreduce(sizes_mib(config), device)
    inside = together if len(nodes) == 1 else rates.allreduce(sizes_mib(config), device, nodes[node])
    gemm_tflops, copy_gbs = rates.own_rates(device)
    own = RankRates(who.rank, who.local_rank, node, gemm_tflops=gemm_tflops, copy_gbs=copy_gbs)
    everyone = rates.gathered(Measured(own, inside, rates.clock_readings(device)))
    report = node_facts.Health(
        time_ms=time.time_ns() // 1_000_000,
        attempt=attempt(os.environ),
        seconds=0.0,
        floors=Floors(**{field.name: getattr(config, field.name) for field in fields(Floors)}),
        allreduce=together,
        nodes=tuple(described(name, ranks, everyone) for name, ranks in nodes.items()),
        ranks=tuple(one.rates for one in everyone),
        pairs=(),
        **platform(device),
    )
    if len(nodes) > 1 and floors.is_below(report):
        from jobs.node_checks import search

        result = search.search(nodes, together, who.rank, device)
        return replace(report, search=result.search, pairs=result.pairs)
    return report


class Measured(NamedTuple):
    """The measurements of one rank: its own rates, all-reduce within its node, and its clock."""

    rates: RankRates
    inside: tuple[AllReduceRate, ...]
    clock: "Readings"


def described(name: str, ranks: list[int], everyone: list[Measured]) -> HealthNode:
    """Return a node's rates and clock, from its first rank."""
    from jobs.node_checks import rates

    first = everyone[ranks[0]]
    bounds = rates.clock_bounds_ms(first.clock, everyone[0].clock)
    return HealthNode(name, ranks=tuple(ranks), allreduce=first.inside, clock_ms=bounds)


def platform(device: "torch.device") -> dict[str, Any]:
    """Return the backend, dtype, device and software of the measurement."""
    import torch

    software: dict[str, str] = {"torch": torch.__version__}
    if device.type != "cuda":
        return {"backend": "gloo", "dtype": "fp32", "device": "cpu", "software": software}
    software["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    name = torch.cuda.get_device_name(device)
    return {"backend": "nccl", "dtype": "bf16", "device": name, "software": software}


def sizes_mib(config: schema.Health) -> list[int]:
    """Return the message sizes: from min_mib, doubled, up to max_mib."""
    sizes = [config.min_mib]
    while sizes[-1] * 2 <= config.max_mib:
        sizes.append(sizes[-1] * 2)
    return sizes


def require(report: node_facts.Health) -> None:
    """Raise BenchError for the first finding; health.json has all of them."""
    if report.findings:
        first, *others = report.findings
        more = f" (and {len(others)} more in health.json)" if others else ""
        raise BenchError(f"{first.what}{more}", where=first.where, fix=first.fix, rule=first.rule)


if __name__ == "__main__":
    main()
