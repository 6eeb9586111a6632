"""How the program of a trial begins on each rank: its arguments, its plan, its log, and what ends it early."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from bench.contract import mllog, plan_kinds, run_files
from bench.contract import plan as plans
from bench.contract.plan import Plan, Trial
from jobs.ranks import process_group
from jobs.ranks.guard import Guard, guarded
from jobs.ranks.identity import Rank, from_environment
from jobs.ranks.watchdog import Watchdog

P = TypeVar("P", bound=Plan)


@dataclass(frozen=True, slots=True)
class Begun(Generic[P]):
    """A trial's program on one rank; the log of rank 0 is open, those of the others write nothing."""

    plan: P
    trial: Trial
    who: Rank
    log: mllog.Writer
    folder: Path
    guard: Guard

    def watchdog(self) -> Watchdog | None:
        """Return what looks for stalls, not yet started; None where nobody does."""
        stall = self.plan.config.launch.stall
        if stall is None:
            return None
        gpu = process_group.gpu_of(self.plan, self.who.local_rank)
        return Watchdog(self.who, stall, self.folder, f"trial {self.trial.index}", self.guard.fail, gpu=gpu)


@contextmanager
def begun(module: str, about: str | None, of: type[P]) -> Iterator[Begun[P]]:
    """Read the command line and the plan, which must be of this class, open the log, and run the body guarded."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("plan", type=Path, help="plan.json of a run folder; the log is written beside it")
    parser.add_argument("--trial", type=int, required=True, help="which of the plan's trials")
    args = parser.parse_args()
    folder, who = args.plan.resolve().parent, from_environment()
    with guarded(folder / run_files.rank_error(f"trial {args.trial}", who.rank)) as guard:
        plan = plan_kinds.required(plan_kinds.load(args.plan), of)
        trial = plans.trial(plan, args.trial)
        is_writer = who.rank == 0
        log = mllog.Writer(folder / trial.log, mllog.load(folder, args.trial)) if is_writer else mllog.Writer(None)
        guard.finish = log.abort
        yield Begun(plan, trial, who, log, folder, guard)
