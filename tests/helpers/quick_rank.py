"""A rank that writes the log of a kernels task in an instant: `quick_rank.py plan.json --trial K`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from bench.contract.plan_kinds import KernelsPlan
from helpers import kernels_log
from jobs.ranks import program

if __name__ == "__main__":
    with program.begun("quick_rank", __doc__, KernelsPlan) as begun:
        kernels_log.fill(begun.plan, begun.log, begun.trial.seed)
