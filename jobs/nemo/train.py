"""Run one trial with NeMo, once per rank: `python -m jobs.nemo.train PLAN --trial K`. It reads the plan and logs."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from bench.contract import attempt, mllog, run_files
from bench.contract import plan as plans
from bench.contract.nemo import NEMO, VERSION
from bench.contract.plan import TrainingPlan, Trial
from bench.errors import ConfigError
from jobs.ranks import process_group, timing
from jobs.ranks.guard import Guard, guarded
from jobs.ranks.identity import Rank, from_environment
from jobs.ranks.telemetry import Telemetry
from jobs.ranks.watchdog import Watchdog, nobody_asks
from jobs.tasks.describe import describe
from jobs.tasks.train import expect, log_caches

PACKAGES = ("torch", "megatron-core", NEMO, "lightning", "transformer-engine")
"""What the log gives the versions of, as far as they are installed."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jobs.nemo.train", description=__doc__)
    parser.add_argument("plan", type=Path, help="plan.json of a run folder; the log is written beside it")
    parser.add_argument("--trial", type=int, required=True, help="which of the plan's trials")
    args = parser.parse_args()
    folder = args.plan.resolve().parent
    who = from_environment()
    with guarded(folder / run_files.rank_error(f"trial {args.trial}", who.rank)) as guard:
        plan = plans.required_training(plans.load(args.plan))
        trial = plans.trial(plan, args.trial)
        require_nemo()
        is_writer = who.rank == 0
        log = mllog.Writer(folder / trial.log, attempt.load(folder, args.trial)) if is_writer else mllog.Writer(None)
        guard.finish = lambda: log.finish("aborted")
        run(plan, trial, who, log, folder, guard=guard)


def require_nemo() -> None:
    """Do nothing where this interpreter has the NeMo that the recipes are of.

    Raises:
        ConfigError: it has none, or another one.
    """
    found = versions().get("nemo_toolkit")
    if found == VERSION:
        return
    raise ConfigError(
        f"{NEMO} {VERSION} is not installed here, but {found}" if found else f"{NEMO} {VERSION} is not installed here",
        where=f"{sys.executable}, engine.nemo.python",
        fix="make NeMo's environment as docs/nemo.md says and set NEMO_PYTHON to its python, or use the nemo image",
    )


def run(plan: TrainingPlan, trial: Trial, who: Rank, log: mllog.Writer, folder: Path, *, guard: Guard) -> None:
    """Initialise, and let NeMo's recipe train; `jobs.nemo.events` does and logs the rest."""
    log_caches(folder / run_files.caches(trial.index), log)
    log.start(mllog.INIT_START)
    _prepare_process()
    process_group.join(plan, who)
    telemetry = Telemetry(plan, who, folder, trial.index)
    stall = plan.config.launch.stall
    watchdog = Watchdog(who, stall, folder, f"trial {trial.index}", guard.fail) if stall else None
    if watchdog is not None:
        watchdog.start(process_group.node_names(who))
    if who.rank == 0:  # it asks git
        describe(plan, trial, versions(), log)
    _fitting(plan, trial, who, log, folder, watchdog=watchdog, fail=guard.fail)()
    timing.log_memory(plan, log)
    telemetry.log(log)
    process_group.leave()


def _prepare_process() -> None:
    """Let NeMo run where there is no GPU, and keep it from asking its makers or a hub for anything."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "NEMO_TELEMETRY": "0"}
    from jobs.nemo import cpu_patch

    cpu_patch.install()


def _fitting(
    plan: TrainingPlan,
    trial: Trial,
    who: Rank,
    log: mllog.Writer,
    folder: Path,
    *,
    watchdog: Watchdog | None,
    fail: Callable[[BaseException], NoReturn],
) -> Callable[[], Any]:
    """Return the recipe with our rows and our callback, ready to be called."""
    from jobs.nemo import recipe
    from jobs.nemo.events import Events
    from jobs.nemo.rows import RowsModule

    events = Events(
        plan,
        trial,
        log,
        alive=watchdog.alive if watchdog else nobody_asks,
        warmed_up=lambda usual: expect(watchdog, usual, plan) if watchdog else None,
        fail=fail,
    )
    own = folder / run_files.RANK_LOGS / f"nemo_{run_files.label(f'trial {trial.index}')}"
    return recipe.fitting(plan, who, data=RowsModule(plan, trial.seed), callback=events, folder=own)


def versions() -> Mapping[str, str]:
    """Return the versions of what trains, without importing any of it."""
    found = {}
    for package in PACKAGES:
        try:
            found[package.replace("-", "_")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
