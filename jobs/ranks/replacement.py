"""Decide whether the node of a slow rank is replaced by a spare node, and tell the batch script which one.

The attempt ends, and the job starts the next one on other nodes from the newest checkpoint. That costs about as much
time as this attempt took to start. It is done only for slow computation that lasts (`SlowRanks.to_replace`), if a spare
node is left, and if the rest of the trial is long enough to win back GAIN times this cost.

Standard library and psutil only.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.contract import atomic_files, node_lists, run_files
from bench.contract.plan import Plan
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import BenchError
from jobs.ranks.slow_ranks import Slow

GAIN = 2.0


@dataclass(frozen=True, slots=True)
class Replacement:
    """What rank 0 knows about replacing a node of its trial."""

    folder: Path
    max_steps: int
    start_s: float
    """From the start of this process to the begin of training."""

    @classmethod
    def of_trial(cls, plan: Plan, folder: Path) -> "Replacement | None":
        """Return it when training begins; None if no node may be replaced, or no checkpoint would be left."""
        if not (isinstance(plan, TrainingPlan) and plan.config.launch.replace_slow):
            return None
        if plan.config.training.checkpoint_every_steps is None or not node_lists.names(folder / run_files.SPARE_NODES):
            return None
        return cls(folder, plan.max_steps, time.time() - psutil.Process().create_time())

    def is_worth(self, slow: Slow, step: int) -> bool:
        """Return whether the steps after this one would save GAIN times the cost, if they had the speed of the others.

        A target may end the trial earlier; how much earlier is unknown.
        """
        return slow.excess_s * (self.max_steps - step) > GAIN * self.start_s

    def requested(self, slow: Slow) -> BenchError:
        """Name the node for the batch script; return the error that ends the attempt."""
        who = f"rank{'s' * (len(slow.ranks) > 1)} {', '.join(map(str, slow.ranks))} on {slow.node}"
        times = f"{1e3 * slow.own_s:,.4g} ms of a step without waiting, others {1e3 * slow.usual_s:,.4g} ms"
        what = f"{who} stayed slow ({times})"
        atomic_files.write_text(self.folder / run_files.SLOW_NODE, f"{slow.node}\nRUN-26: {what}\n")
        return BenchError(
            what, where=slow.node, fix="no action is needed: the next attempt uses a spare node", rule="RUN-26"
        )
