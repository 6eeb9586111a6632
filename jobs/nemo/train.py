"""Run one trial with NeMo, once per rank: `python -m jobs.nemo.train PLAN --trial K`. It writes the log."""

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
from jobs.ranks.watchdog import Watchdog, ignore_progress
from jobs.tasks import inputs
from jobs.tasks.describe import describe, log_caches
from jobs.tasks.train import expect

PACKAGES = ("torch", "megatron-core", NEMO, "lightning", "transformer-engine")
"""Packages whose versions are logged, if installed."""


def main() -> None:
    with program.begun("jobs.nemo.train", __doc__, TrainingPlan) as begun:
        require_nemo()
        run(begun)


def require_nemo() -> None:
    """Require the version of NeMo that the recipes need.

    Raises:
        ConfigError: NeMo is missing, or has another version.
    """
    installed = versions().get("nemo_toolkit")
    if installed == VERSION:
        return
    raise ConfigError(
        f"{NEMO} {VERSION} is required, but {installed or 'none'} is installed",
        where=f"{sys.executable}, engine.nemo.python",
        fix="create NeMo's environment (docs/nemo.md) and set NEMO_PYTHON to its python, or use the nemo image",
    )


def run(begun: Begun[TrainingPlan]) -> None:
    """Initialise, and train with NeMo's recipe; `jobs.nemo.events` does the rest, and logs."""
    plan, trial, who, log, folder = begun.plan, begun.trial, begun.who, begun.log, begun.folder
    log_caches(folder / run_files.caches(trial.index), log)
    log.start(mllog.INIT_START)
    _prepare_process()
    process_group.join(plan, who)
    telemetry = Telemetry(plan, who, folder, trial.index)
    watchdog = begun.watchdog()
    if watchdog is not None:
        watchdog.start(process_group.node_names(who))
    if who.rank == 0:  # it runs git
        describe(plan, trial, versions(), log)
    inputs.check_weights(plan, log, who)
    _fitting(begun, watchdog)()
    telemetry.log(log)
    process_group.shut_down()


def _prepare_process() -> None:
    """Let NeMo run without a GPU, and disable its telemetry and downloads from the Hugging Face hub."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "NEMO_TELEMETRY": "0"}
    from jobs.nemo import cpu_patch

    cpu_patch.install()


def _fitting(begun: Begun[TrainingPlan], watchdog: Watchdog | None) -> Callable[[], Any]:
    """Return the recipe with our rows and our callback as a callable."""
    from jobs.nemo import recipe
    from jobs.nemo.events import Events
    from jobs.nemo.rows import RowsModule

    plan, trial = begun.plan, begun.trial
    events = Events(
        begun,
        alive=watchdog.alive if watchdog else ignore_progress,
        warmed_up=lambda usual: expect(watchdog, usual, plan) if watchdog else None,
    )
    own = begun.folder / run_files.RANK_LOGS / f"nemo_{run_files.label(f'trial {trial.index}')}"
    return recipe.fitting(plan, begun.who, data=RowsModule(plan, trial.seed), callback=events, folder=own)


def versions() -> Mapping[str, str]:
    """Return the versions of the training packages, without importing them."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package.replace("-", "_")] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


if __name__ == "__main__":
    main()
