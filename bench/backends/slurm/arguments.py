"""What stands only on sbatch's command line."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from bench.contract import run_files
from bench.contract.plan import Plan
from bench.contract.slurm import Slurm


def sbatch_arguments(plan: Plan, folder: Path) -> list[str]:
    """Return what only stands on sbatch's command line: whose job it is, where its output goes, and the user's own."""
    s = plan.config.cluster.slurm or Slurm()
    own = {"account": s.account, "qos": s.qos, "reservation": s.reservation}
    out = run_files.ELEMENT_OUTPUT if plan.config.launch.array else run_files.JOB_OUTPUT
    return [
        *(f"--{key}={value}" for key, value in own.items() if value),
        f"--output={str(folder).replace('%', '%%')}/{out}",
        *s.arguments,
    ]


def excluding(plan: Plan, nodes: Sequence[str]) -> str:
    """Return the override, as one would paste it, that leaves nodes out beside those that are left out already."""
    own = plan.config.cluster.slurm.arguments if plan.config.cluster.slurm else []
    excluded = [word.partition("=")[2] for word in own if word.startswith("--exclude=")]
    words = [*(word for word in own if not word.startswith("--exclude=")), f"--exclude={','.join([*excluded, *nodes])}"]
    return shlex.quote(f"cluster.slurm.arguments={json.dumps(words)}")
