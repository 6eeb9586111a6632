"""Create the folder of a run, and open the folders of others: what other users wrote is read, and not acted on.

`require_ours` comes before everything that runs, signals, cancels, submits or changes a run. Verbs that only read open
any folder; they read regular files only (`bench.contract.regular_files`), say whose folder it is (`other_writers`), and
query no server that it names.
"""

import itertools
import os
import pwd
import re
import shlex
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from bench import masking
from bench.contract import atomic_files, plan_kinds, plan_paths, run_files
from bench.contract.plan import Plan
from bench.contract.regular_files import OTHERS_WRITE
from bench.contract.run_files import CONFIG, PLAN, RANK_LOGS
from bench.errors import ConfigError

FILES = (
    *(run_files.CONFIG, run_files.PLAN, run_files.LEDGER, run_files.STATUS, run_files.MANIFEST, run_files.JOB),
    *(run_files.SCRIPT, run_files.KUBERNETES_MANIFEST, run_files.RAY_JOB, run_files.LEDGER_LOCK, run_files.RUN_LOCK),
    *(run_files.OWNER, run_files.SUBMISSION, run_files.DISK_RESERVE, run_files.RESULTS, run_files.binding("*")),
    *(run_files.prepare_log("*"), run_files.health("*"), run_files.interrupted("*")),
    *(run_files.LEFT_OUT, run_files.USED_NODES, run_files.SPARE_NODES, run_files.SLOW_NODE),
)
"""What a run executes or believes when it is resumed."""
FOLDERS = (
    *(run_files.RANK_LOGS, run_files.ATTEMPTS, run_files.facts("*"), run_files.checkpoints("*")),
    *(f"{run_files.checkpoints('*')}/*", run_files.adapters("*")),
)
NOT_OTHERS = 0o777 & ~OTHERS_WRITE
"""The mode of a run folder; the umask may remove more bits."""


def make(plan: Plan, config_yaml: str) -> Path:
    """Create the folder of a run with config.yaml and plan.json in it, and return its path.

    Raises:
        ConfigError: it exists, cannot be created, or a file in it would hold a secret.
    """
    folder, plan_text, is_created = _path(plan), plan_kinds.dumps(plan), False
    masking.refuse([config_yaml], where=CONFIG)
    masking.refuse([plan_text], where=PLAN)
    try:
        for missing in reversed([parent for parent in folder.parents if not parent.exists()]):
            missing.mkdir(mode=NOT_OTHERS, exist_ok=True)
        folder.mkdir(mode=NOT_OTHERS)
        is_created = True
        _require_ours_or_remove(folder)
        (folder / RANK_LOGS).mkdir(mode=NOT_OTHERS)
        for name, text in ((CONFIG, config_yaml), (PLAN, plan_text)):
            atomic_files.write_text(folder / name, text)  # the plan last: with it a killed launch can be resumed
    except FileExistsError as error:
        raise ConfigError(
            "the run folder exists already",
            where=str(folder),
            fix="remove launch.folder to get a new folder, or set launch.folder to a folder that does not exist",
            rule="CFG-05",
        ) from error
    except OSError as error:
        if is_created:
            shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            f"the run folder cannot be created: {error.strerror}",
            where=str(folder),
            fix="set LOGDIR to a writable folder",
            rule="CFG-08",
        ) from error
    return folder


def require_ours(folder: Path) -> None:
    """Raise ConfigError unless this user owns a run folder and its files, and no other user can write to them.

    A user who can write there can change results, and the plan, which defines what runs. `check_owner` in job.sh
    makes the same checks of the folder. Files of root are accepted: a container may run as root.
    """
    status, parent = folder.lstat(), folder.resolve().parent.stat()
    if stat.S_ISLNK(status.st_mode):
        raise _not_ours(
            "the run folder is a symbolic link", folder, fix="give the path of the folder itself, not of the link"
        )
    if status.st_uid != os.geteuid():
        raise _not_ours("another user owns this run folder", folder, fix="start your own run with `runstop launch`")
    if status.st_mode & OTHERS_WRITE:
        fix = f"check that the folder has no files of other users, then: chmod go-w {short(folder)}"
        raise _not_ours("other users can write to this run folder", folder, fix=fix)
    if parent.st_mode & stat.S_IWOTH and not parent.st_mode & stat.S_ISVTX:
        fix = f"set LOGDIR to a folder below {folder.parent} that only you can write to"
        raise _not_ours("every user can rename files in this folder, including the run folder", folder.parent, fix=fix)
    for path, is_folder in _content(folder):
        _require_our_file(path, folder, is_folder=is_folder)


def _content(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the files and folders that a run acts on, and whether it must be a folder."""
    for pattern, is_folder in itertools.chain(((name, False) for name in FILES), ((name, True) for name in FOLDERS)):
        yield from ((path, is_folder) for path in sorted(folder.glob(pattern)))


def _require_our_file(path: Path, folder: Path, *, is_folder: bool) -> None:
    status = path.lstat()
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        expected = "a folder" if is_folder else "a regular file"
        raise _not_ours(f"this path in the run folder is not {expected}", path, fix="start a new run")
    if status.st_uid not in (os.geteuid(), 0):
        raise _not_ours(
            f"this file of the run belongs to {_name(status.st_uid)}, not to you", path, fix="start a new run"
        )
    if status.st_mode & OTHERS_WRITE:
        fix = f"check that no one changed the file, then: chmod -R go-w {shlex.quote(str(folder))}"
        raise _not_ours("other users can write to this file of the run", path, fix=fix)


def other_writers(folder: Path) -> str:
    """Return why a run folder is not this user's alone, as a sentence; empty if it is."""
    try:
        status = folder.resolve().stat()
    except OSError:  # the reader reports it
        return ""
    if status.st_uid != os.geteuid():
        return f"{_name(status.st_uid)} owns this folder"
    return "other users can write to this folder" if status.st_mode & OTHERS_WRITE else ""


def _name(uid: int) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _require_ours_or_remove(folder: Path) -> None:
    try:
        require_ours(folder)
    except ConfigError:
        folder.rmdir()
        raise


def _not_ours(what: str, where: Path, *, fix: str) -> ConfigError:
    return ConfigError(what, where=str(where), fix=fix, rule="CFG-11")


def plan_in(folder: Path) -> Plan | None:
    """Return the plan of a run folder; None if it has none, or if that cannot be read."""
    with suppress(ConfigError):
        return plan_kinds.load(folder / PLAN)
    return None


def _path(plan: Plan) -> Path:
    if plan.config.launch.folder is not None:
        return Path(plan.config.launch.folder)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{plan.name}-{token_hex(2)}"
    return Path(str(plan_paths.expanded(plan.config.cluster.paths.logs))) / name


def of_array(parent: Path) -> Path:
    """Return a new folder for a job array, next to the folders of its runs."""
    folder = parent / f"array-{time.strftime('%Y%m%d-%H%M%S')}-{token_hex(2)}"
    folder.mkdir(mode=NOT_OTHERS)
    return folder


def named(fix: str, folder: Path) -> str:
    """Return the fix of a run with its folder in the commands that have the placeholder RUN."""
    return re.sub(r"(?<=\brunstop )(resume|why) RUN\b", lambda match: f"{match[1]} {short(folder)}", fix)


def short(path: Path) -> str:
    """Return the path, quoted for a shell; relative to the working directory if it is below it."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)
