"""Start the ranks of several nodes on this machine, as srun would."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.backends.local import free_port
from helpers import ranks
from helpers.paths import ROOT

NUM_NODES, PER_NODE = 2, 2


def on_nodes(folder: Path, *command: str, size: tuple[int, int] = (NUM_NODES, PER_NODE), **env: str) -> Any:
    """Run a command on (nodes, ranks of each), as srun would; return exit codes and what was printed."""
    num_nodes, per_node = size
    shared = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(num_nodes * per_node),
    }
    places = [(rank, rank // per_node, rank % per_node) for rank in range(num_nodes * per_node)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(local), "SLURMD_NODENAME": f"dgx-{node}"} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, node, local in places
    ]
    return ranks.finish(started, timeout_s=300)
