"""Run one trial with NeMo, once per rank: `python -m jobs.nemo.train PLAN --trial K`. It reads the plan and logs."""

import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from bench.contract import mllog, run_files
from bench.contract.engine import NEMO, VERSION
from bench.contract.plan_kinds import TrainingPlan
from bench.errors import ConfigError
from jobs.ranks import process_group, program
from jobs.ranks.program import Begun
from jobs.ranks.telemetry import Telemetry
from jobs.ranks.watchdog import Watchdog, nobody_asks
from jobs.tasks.describe import describe
from jobs.tasks.train import expect, log_caches

PACKAGES = ("torch", "megatron-core", NEMO, "lightning", "transformer-engine")
"""What the log gives the versions of, as far as they are installed."""


def main() -> None:
    with program.begun("jobs.nemo.train", __doc__, TrainingPlan) as begun:
        require_nemo()
        run(begun)


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


def run(begun: Begun[TrainingPlan]) -> None:
    """Initialise, and let NeMo's recipe train; `jobs.nemo.events` does and logs the rest."""
    plan, trial, who, log, folder = begun.plan, begun.trial, begun.who, begun.log, begun.folder
    log_caches(folder / run_files.caches(trial.index), log)
    log.start(mllog.INIT_START)
    _prepare_process()
    process_group.join(plan, who)
    telemetry = Telemetry(plan, who, folder, trial.index)
    watchdog = begun.watchdog()
    if watchdog is not None:
        watchdog.start(process_group.node_names(who))
    if who.rank == 0:  # it asks git
        describe(plan, trial, versions(), log)
    _fitting(begun, watchdog)()
    telemetry.log(log)
    process_group.leave()


def _prepare_process() -> None:
    """Let NeMo run where there is no GPU, and keep it from asking its makers or a hub for anything."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "NEMO_TELEMETRY": "0"}
    from jobs.nemo import cpu_patch

    cpu_patch.install()


def _fitting(begun: Begun[TrainingPlan], watchdog: Watchdog | None) -> Callable[[], Any]:
    """Return the recipe with our rows and our callback, ready to be called."""
    from jobs.nemo import recipe
    from jobs.nemo.events import Events
    from jobs.nemo.rows import RowsModule

    plan, trial = begun.plan, begun.trial
    events = Events(
        begun,
        alive=watchdog.alive if watchdog else nobody_asks,
        warmed_up=lambda usual: expect(watchdog, usual, plan) if watchdog else None,
    )
    own = begun.folder / run_files.RANK_LOGS / f"nemo_{run_files.label(f'trial {trial.index}')}"
    return recipe.fitting(plan, begun.who, data=RowsModule(plan, trial.seed), callback=events, folder=own)


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
