"""How ranks shut down their process group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.backends.local import free_port
from helpers import ranks

ALONE = """
import pathlib
from bench.contract import plan_kinds
from jobs.engines import megatron
from jobs.ranks import identity, timing

plan = plan_kinds.load(pathlib.Path("plan.json"))
megatron.start_ranks(plan, identity.from_environment())
import torch.distributed.nn  # its functions have the group of that moment as their default argument
engine = megatron.build(plan, 1)
engine.warm_up(1, 1, profile=None)
timing.settle()
del engine
megatron.end_ranks()
print(*sorted(file.read_text().strip() for file in pathlib.Path("/proc/self/task").glob("*/comm")))
"""


@pytest.mark.starts
def test_gloo_threads_end_before_python_shuts_down(tmp_path: Path) -> None:
    """It would need the GIL to free a tensor during Python's shutdown, and would abort the process."""
    plan = ranks.compose(tmp_path, "task=pretrain_tiny", "cluster.ranks_per_node=1", "cluster.device=cpu")
    folder = ranks.write(plan, tmp_path / "run")
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    environment = os.environ | plan.environment | alone | {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ranks.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= {"python", "python3"}
