"""Start the ranks of several nodes on this machine, as srun would."""

import os
from pathlib import Path
from typing import Any

from bench.backends.local import free_port
from bench.contract.node_facts import AllReduceRate, Floors, Health, HealthNode, RankRates
from helpers import ranks

NUM_NODES, PER_NODE = 2, 2
NAMES = ("dgx-0", "dgx-1", "dgx-2", "dgx-3")


def health_report(**changes: Any) -> Health:
    """Return the measurements of three nodes with two ranks each, all alike and above their floors; not judged yet."""
    names = NAMES[:3]
    sound: dict[str, Any] = {
        "time_ms": 1_780_000_000_000,
        "attempt": None,
        "backend": "nccl",
        "dtype": "bf16",
        "device": "NVIDIA H200",
        "software": {"torch": "2.13.0"},
        "seconds": 12.5,
        "floors": Floors(busbw_gbs=300.0, node_busbw_gbs=300.0, gemm_tflops=575.0, copy_gbs=3580.0),
        "allreduce": (AllReduceRate(62, 1.0, 280.0), AllReduceRate(124, 1.0, 350.0)),
        "nodes": tuple(
            HealthNode(name, (2 * i, 2 * i + 1), (AllReduceRate(124, 1.0, 340.0),), (-1.0, 1.0))
            for i, name in enumerate(names)
        ),
        "ranks": tuple(RankRates(rank, rank % 2, names[rank // 2], 680.0, 4200.0) for rank in range(6)),
        "pairs": (),
    }
    return Health(**sound | changes)


def on_nodes(folder: Path, *command: str, size: tuple[int, int] = (NUM_NODES, PER_NODE), **env: str) -> Any:
    """Run a command on (nodes, ranks of each), as srun would; return exit codes and what was printed."""
    num_nodes, per_node = size
    shared = os.environ | {
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_nodes * per_node),
    }
    places = [(rank, rank // per_node, rank % per_node) for rank in range(num_nodes * per_node)]
    environments = [
        shared | {"RANK": str(rank), "LOCAL_RANK": str(local), "SLURMD_NODENAME": f"dgx-{node}"} | env
        for rank, node, local in places
    ]
    return ranks.ended_in(folder, command, environments)
