"""How fast the nodes and the links between them are, once per rank, before the first trial: `python -m jobs.node_checks.health PLAN`.

Measures all-reduce over all ranks and within each node, matrix products and memory copies of every rank, and how far apart
the nodes' clocks are. Rank 0 writes health.json beside the plan; below a floor of cluster.health every rank fails.
"""

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.contract import plan as plans
from bench.contract import run_files
from bench.contract.schema import Health
from bench.errors import BenchError, ConfigError
from jobs.node_checks import floors
from jobs.node_checks.facts import attempt, save
from jobs.ranks import guard, process_group
from jobs.ranks.identity import Rank, from_environment, node_name

if TYPE_CHECKING:
    import torch

VERSION = 1
MIN_NODES_FOR_PAIRS = 3
"""Of two slow nodes nobody can tell which one it is."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.node_checks.health", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan.json of a run folder; health.json is written beside it")
    args = parser.parse_args()
    folder, who, began = args.plan.resolve().parent, from_environment(), time.monotonic()
    with guard.guarded(folder / run_files.rank_error(f"health{run_files.element()}", who.rank)):
        plan = plans.load(args.plan)
        health = plan.config.cluster.health
        if health is None:
            name = plan.config.cluster.name
            raise ConfigError(
                f"nobody said what is healthy on {name}",
                where="cluster.health",
                fix=f"give conf/cluster/{name}.yaml a health block",
            )
        from jobs.node_checks import rates

        device = process_group.join(plan, who, timeout_s=rates.MEETING_S)
        from torch import distributed

        report = measure(health, who, device)
        report = floors.judged(report | {"seconds": round(time.monotonic() - began, 1)})
        if who.rank == 0:
            save(report, folder / run_files.health(run_files.element()))
            print(floors.table(report))
        rates.slowest(0.0, device)  # nobody leaves before rank 0 has written
        distributed.destroy_process_group()
        require(report)


def measure(health: Health, who: Rank, device: "torch.device") -> dict[str, Any]:
    """Return all that is measured, the same on every rank."""
    import torch

    from jobs.node_checks import rates

    node, nodes = node_name(), {}
    for rank, name in enumerate(rates.gathered(node)):
        nodes.setdefault(name, []).append(rank)
    together = rates.allreduce(sizes_mib(health), device)
    inside = together if len(nodes) == 1 else rates.allreduce(sizes_mib(health), device, nodes[node])
    own = {"rank": who.rank, "local_rank": who.local_rank, "node": node} | rates.own_rates(device)
    everyone = rates.gathered({"rates": own, "inside": inside, "clock": rates.clock_readings(device)})
    gpu = device.type == "cuda"
    report = {
        "version": VERSION,
        "time_ms": time.time_ns() // 1_000_000,
        "attempt": attempt(os.environ),
        "backend": "nccl" if gpu else "gloo",
        "dtype": "bf16" if gpu else "fp32",
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "software": {"torch": torch.__version__} | ({"nccl": _dotted(torch.cuda.nccl.version())} if gpu else {}),
        "floors": {key: value for key, value in asdict(health).items() if key.endswith(("_gbs", "_tflops"))},
        "allreduce": together,
        "nodes": [
            {
                "node": name,
                "ranks": ranks,
                "allreduce": everyone[ranks[0]]["inside"],
                "clock_ms": rates.clock_bounds_ms(everyone[ranks[0]]["clock"], everyone[0]["clock"]),
            }
            for name, ranks in nodes.items()
        ],
        "ranks": [one["rates"] for one in everyone],
        "pairs": [],
    }
    if len(nodes) >= MIN_NODES_FOR_PAIRS and floors.is_below(report):
        best = max(together, key=lambda row: row["busbw_gbs"])
        report["pairs"] = rates.pairs(nodes, best["mib"], who.rank, device)
    return report


def sizes_mib(health: Health) -> list[int]:
    """Return the message sizes: from min_mib, doubled, up to max_mib."""
    sizes = [health.min_mib]
    while sizes[-1] * 2 <= health.max_mib:
        sizes.append(sizes[-1] * 2)
    return sizes


def require(report: dict[str, Any]) -> None:
    """Raise the first of what is below a floor; health.json has all of it."""
    if report["findings"]:
        first, *others = report["findings"]
        more = f" (and {len(others)} more in health.json)" if others else ""
        raise BenchError(f"{first['what']}{more}", where=first["where"], fix=first["fix"], rule=first["rule"])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    main()
