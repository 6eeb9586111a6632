"""A run's folder: made for this run alone."""

import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from bench import masking
from bench.contract import plan_kinds, plan_paths
from bench.contract.plan import Plan
from bench.contract.run_files import CONFIG, PLAN, RANK_LOGS
from bench.errors import ConfigError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
NOT_OTHERS = 0o777 & ~OTHERS_WRITE
"""The mode of a run folder; the umask may take away more."""


def make(plan: Plan, config_yaml: str) -> Path:
    """Return a new folder that is this run's alone, with what was asked and what was worked out in it.

    Raises:
        ConfigError: it exists, cannot be made or written, or holds a secret.
    """
    folder, plan_text, is_made = _path(plan), plan_kinds.dumps(plan), False
    masking.refuse([config_yaml], where=CONFIG)
    masking.refuse([plan_text], where=PLAN)
    try:
        for missing in reversed([parent for parent in folder.parents if not parent.exists()]):
            missing.mkdir(mode=NOT_OTHERS, exist_ok=True)
        folder.mkdir(mode=NOT_OTHERS)
        is_made = True
        _require_ours_or_remove(folder)
        (folder / RANK_LOGS).mkdir(mode=NOT_OTHERS)
        for name, text in ((CONFIG, config_yaml), (PLAN, plan_text)):
            with (folder / name).open("x") as file:
                file.write(text)
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


def require_ours(folder: Path) -> None:
    """Raise ConfigError unless a run folder belongs to this user, and nobody else may write in it or exchange it.

    Whoever may write there can change a plan, which says what runs, and results. `require_ours` in job.sh is the same.
    """
    found, parent = folder.lstat(), folder.resolve().parent.stat()
    if stat.S_ISLNK(found.st_mode):
        raise _not_ours("this is a symbolic link", folder, fix="name the folder itself")
    if found.st_uid != os.geteuid():
        raise _not_ours("this run folder belongs to somebody else", folder, fix="start a run of your own")
    if found.st_mode & OTHERS_WRITE:
        fix = f"look for what is not yours in it, then chmod go-w {folder}"
        raise _not_ours("others may write in this run folder", folder, fix=fix)
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        fix = "take a folder in it in which only you may write: set LOGDIR"
        raise _not_ours("everybody may rename what lies here, also this run folder", folder.parent, fix=fix)


def _require_ours_or_remove(folder: Path) -> None:
    try:
        require_ours(folder)
    except ConfigError:
        folder.rmdir()
        raise


def _not_ours(what: str, where: Path, *, fix: str) -> ConfigError:
    return ConfigError(what, where=str(where), fix=fix, rule="CFG-11")


def plan_in(folder: Path) -> Plan | None:
    """Return the plan of a run folder; None if there is none, or none that can be read: logs are read without one."""
    with suppress(ConfigError):
        return plan_kinds.load(folder / PLAN)
    return None


def _path(plan: Plan) -> Path:
    if plan.config.launch.folder is not None:
        return Path(plan.config.launch.folder)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.name}-{token_hex(2)}"
    return Path(str(plan_paths.expanded(plan.config.cluster.paths.logs))) / name


def short(path: Path) -> str:
    """Return the path as one would type it here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
