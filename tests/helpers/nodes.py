"""Start the ranks of several nodes on this machine, as srun would."""

import os
from pathlib import Path
from typing import Any

from bench.backends.local import free_port
from helpers import ranks

NUM_NODES, PER_NODE = 2, 2


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
