"""Start the program of a trial on each rank: arguments, plan, log and guard."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from bench.contract import checksums, mllog, plan_kinds, run_files
from bench.contract import plan as plans
from bench.contract.plan import Plan, Trial
from bench.errors import ConfigError
from jobs.profiles import nsys
from jobs.ranks import flight_recorder, process_group
from jobs.ranks.guard import Guard, exit_process, guarded
from jobs.ranks.identity import Rank, from_environment
from jobs.ranks.watchdog import Watchdog

P = TypeVar("P", bound=Plan)


@dataclass(frozen=True, slots=True)
class Begun(Generic[P]):
    """The started program of a trial on one rank. Only rank 0 writes a log."""

    plan: P
    trial: Trial
    who: Rank
    log: mllog.Writer
    folder: Path
    guard: Guard

    def watchdog(self) -> Watchdog | None:
        """Return the watchdog, not yet started; None if launch.stall is null."""
        stall = self.plan.config.launch.stall
        if stall is None:
            return None
        gpu = process_group.gpu_of(self.plan, self.who.local_rank)
        return Watchdog(self.who, stall, self.folder, f"trial {self.trial.index}", self.guard.fail, gpu=gpu)


def loaded(path: Path, binding: mllog.Binding | None) -> Plan:
    """Return the plan in a file, which must be the one with which the attempt began.

    Raises:
        ConfigError: it cannot be read, or it is another one.
    """
    text = plan_kinds.text(path)
    if binding is not None and binding.plan_sha256 not in (None, plan_kinds.identity(text)):
        fix = "find out who changed the plan and restore the file; to use another plan, start a new run"
        raise checksums.changed(f"{path.name} was changed since this trial began", path, fix=fix)
    return plan_kinds.loads(text, where=str(path))


@contextmanager
def begun(module: str, description: str | None, plan_type: type[P]) -> Iterator[Begun[P]]:
    """Read the command line and the plan, which must be of this type, open the log, and run the body guarded.

    The process ends with the body, unless nsys has started it: nsys writes its report at the end of Python.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("plan", type=Path, help="plan.json of a run folder; the log is written to the same folder")
    parser.add_argument("--trial", type=int, required=True, help="index of the trial")
    args = parser.parse_args()
    folder, who = args.plan.resolve().parent, from_environment()
    with guarded(folder / run_files.rank_error(f"trial {args.trial}", who.rank)) as guard:
        plan = plan_kinds.required(loaded(args.plan, mllog.load(folder, args.trial)), plan_type)
        trial = plans.trial(plan, args.trial)
        flight_recorder.enable(folder, f"trial {args.trial}")
        is_writer = who.rank == 0
        log = _opened(folder, trial) if is_writer else mllog.Writer(None)
        guard.finish = log.abort
        yield Begun(plan, trial, who, log, folder, guard)
    if nsys.INSIDE not in os.environ:
        exit_process()


def _opened(folder: Path, trial: Trial) -> mllog.Writer:
    """Open the log of a trial for the attempt that this rank was started for.

    Raises:
        ConfigError: there is a log, or a later attempt has begun; this rank then leaves no log.
    """
    log = mllog.Writer(folder / trial.log, mllog.own(folder, trial.index))
    try:
        mllog.own(folder, trial.index)
    except ConfigError:  # the later attempt began after the first look, and has moved the earlier files away
        log.close()
        (folder / trial.log).unlink()
        raise
    return log
