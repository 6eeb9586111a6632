"""A run's folder: made for this run alone."""

import os
import secrets
import shutil
import time
from pathlib import Path

from bench.contract import plan as plans
from bench.contract.plan import Plan
from bench.contract.run_files import CONFIG, PLAN, RANK_LOGS
from bench.errors import ConfigError


def make(plan: Plan, config_yaml: str) -> Path:
    """Return a new folder that is this run's alone, with what was asked and what was worked out in it.

    Raises:
        ConfigError: it exists, or cannot be made or written.
    """
    folder, is_made = _path(plan), False
    try:
        folder.mkdir(parents=True)
        is_made = True
        (folder / RANK_LOGS).mkdir()
        (folder / CONFIG).write_text(config_yaml)
        (folder / PLAN).write_text(plans.dumps(plan))
    except FileExistsError as error:
        raise ConfigError(
            "this folder exists, and a run never writes into another's",
            where=str(folder),
            fix="leave launch.folder out for a new one",
            rule="CFG-05",
        ) from error
    except OSError as error:
        if is_made:
            shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"the run folder cannot be made: {error.strerror}",
            where=str(folder),
            fix="set LOGDIR to a writable folder",
            rule="CFG-08",
        ) from error
    return folder


def _path(plan: Plan) -> Path:
    if plan.config.launch.folder is not None:
        return Path(plan.config.launch.folder)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.name}-{secrets.token_hex(2)}"
    return Path(str(plans.expanded(plan.config.cluster.paths.logs))) / name


def short(path: Path) -> str:
    """Return the path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
