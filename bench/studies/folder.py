"""Read and write the folder of a study: study.yaml (the study as loaded), arms.json (the plans), and the run folders.

    LOGDIR/studies/NAME-CLUSTER/
      study.yaml  arms.json  not_started.json
      ARM.BLOCK/              the run folder of an arm in a block; blocks count from 1
      ARM.bSIZE.BLOCK/        the same with a micro-batch of SIZE, if the study searches the largest one

All measurements come from the logs in the run folders.
"""

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench import masked_json
from bench.backends import run_lock
from bench.contract import atomic_files
from bench.errors import ConfigError
from bench.planning import compose
from bench.results.published import PublishedTable
from bench.results.study import PlannedArm
from bench.runs.folder import NOT_OTHERS, require_ours, short
from bench.studies import arms as arms_of
from bench.studies import checks, library
from bench.studies.arms import Arm
from bench.studies.spec import Part, Study

STUDIES = "studies"
STUDY, ARMS, NOT_STARTED = "study.yaml", "arms.json", "not_started.json"
NEUTRAL = (
    "launch.wait",
    "launch.force",
    "launch.trackers",
    "launch.attempts",
    "walltime",
    "cluster.paths.logs",
    "cluster.price_per_gpu_hour",
    "cluster.currency",
)
"""Overrides that may change between two calls, since they do not affect the measurements."""


class StoredStudy(Part, frozen=True, kw_only=True):
    """The content of study.yaml: all that is needed to read the study later, even if conf/ has changed."""

    name: str
    cluster: str
    overrides: tuple[str, ...]
    """Of the command line; `words` in files of earlier versions."""
    config_dir: str | None = None
    runs: int | None = None
    """Runs of each arm, if set on the command line; also in `study`."""
    tune: tuple[str, ...] = ()
    """Arguments of the `runstop tune` that made this study; empty for a study of conf/."""
    study: Study
    publications: dict[str, PublishedTable]

    @property
    def command(self) -> str:
        """The command that continues the study."""
        if self.tune:
            return shlex.join(["runstop", "tune", *self.tune])
        runs = ["--runs", str(self.runs)] if self.runs else []
        site = ["--config-dir", self.config_dir] if self.config_dir else []
        return shlex.join(["runstop", "study", self.name, *self.overrides, *runs, *site])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """One run of a study: its arm, its block (from 0), and its micro-batch if the study searches the largest one."""

    arm: Arm
    block: int
    batch: int | None = None

    def within(self, folder: Path) -> Path:
        size = "" if self.batch is None else f".b{self.batch}"
        return folder / f"{self.arm.slug}{size}.{self.block + 1}"


def path(logs: Path, *, name: str, cluster: str) -> Path:
    """Return the folder of a study on a cluster."""
    return logs / STUDIES / f"{name}-{cluster}"


def read(folder: Path) -> StoredStudy:
    """Return the study in a folder.

    Raises:
        ConfigError: it is not a study's folder.
    """
    if not (folder / STUDY).exists():
        fix = "remove --table to run the study, or set cluster= to the cluster on which the study ran"
        raise ConfigError("the study has no results in this folder, so there is no table", where=str(folder), fix=fix)
    stored = library.load_yaml(folder / STUDY, StoredStudy)
    checks.check_runs(stored.study.runs, where=f"{folder / STUDY}: runs")
    return stored


def name_of(folder: Path) -> str:
    """Return the name of the study in a folder; raises as `read`."""
    return read(folder).name


def read_planned(folder: Path) -> dict[str, PlannedArm]:
    """Return the planned arms by name; empty if they cannot be read."""
    raw = atomic_files.read(folder / ARMS)
    try:
        return {arm.name: arm for arm in msgspec.convert(raw, list[PlannedArm])}
    except msgspec.ValidationError:
        return {}


def not_started_reasons(folder: Path) -> dict[str, str]:
    """Return why runs were not started, by the names of their folders, which do not exist."""
    return {name: str(reason) for name, reason in atomic_files.read_object(folder / NOT_STARTED).items()}


def write_not_started(folder: Path, reasons: dict[str, str]) -> None:
    masked_json.write(folder / NOT_STARTED, reasons)


@contextmanager
def locked(folder: Path, now: StoredStudy, arms: Sequence[PlannedArm]) -> Iterator[None]:
    """Lock a study's folder for the block, and write study.yaml and arms.json.

    Raises:
        ConfigError: another process runs the study, or an arm with runs has changed.
    """
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        missing.mkdir(mode=NOT_OTHERS, exist_ok=True)
    require_ours(folder.resolve())
    fix = f"wait for this process, or stop it with Ctrl-C; to see the results: runstop study {short(folder)} --table"
    with run_lock.driving(folder, noun="study", fix=fix):
        if (folder / STUDY).exists():
            _check_same(folder, now, arms)
        library.dump_yaml(folder / STUDY, msgspec.to_builtins(now))
        masked_json.write(folder / ARMS, [_plain(arm) for arm in arms])
        yield


def _plain(arm: PlannedArm) -> dict[str, Any]:
    return dict(msgspec.to_builtins(dataclasses.asdict(arm)))


def _check_same(folder: Path, now: StoredStudy, arms: Sequence[PlannedArm]) -> None:
    """Raise ConfigError if an arm that has runs has changed since they were started."""
    before, old_plans = read(folder), read_planned(folder)
    old, new = _settings(before), _settings(now)
    for arm in arms:
        if arm.name not in old or not any(folder.glob(f"{arms_of.slug(arm.name)}.*")):
            continue
        if what := _difference(old[arm.name], new[arm.name]):
            raise _changed(f"the arm {arm.name!r} {what}", folder)
        prints = [one.fingerprint for one in (old_plans.get(arm.name), arm) if one is not None and one.fingerprint]
        if prints[1:] and prints[0] != prints[1]:
            raise _changed(
                f"the plan of the arm {arm.name!r} has changed, because conf/ or the code of runstop has changed",
                folder,
            )


def _settings(stored: StoredStudy) -> dict[str, list[str]]:
    """Return, by arm, the settings that affect its measurements."""
    study = stored.study
    length = [f"{name}={value}" for name, value in (("window", study.window), ("max_batch", study.max_batch)) if value]
    return {
        arm.name: [
            *(one for one in (*arm.overrides, *stored.overrides) if compose.override_key(one) not in NEUTRAL),
            *length,
            *([f"calculated={arm.calculated}"] if arm.calculated else []),
        ]
        for arm in arms_of.build(study, where=STUDY)
    }


def _difference(old: Sequence[str], new: Sequence[str]) -> str:
    """Return the removed and the added settings as a text; empty if nothing differs."""
    if list(old) == list(new):
        return ""
    changes = {
        "no longer has": [one for one in old if one not in new],
        "now has": [one for one in new if one not in old],
    }
    texts = [f"{change} {' '.join(settings)}" for change, settings in changes.items() if settings]
    return " and ".join(texts) or "has its settings in another order"


def _changed(what: str, folder: Path) -> ConfigError:
    return ConfigError(
        f"the study has changed since its runs started, so new runs would not be comparable: {what}",
        where=str(folder),
        fix=f"undo the change, or rename {short(folder)} to start the study in a new folder",
        rule="CFG-05",
    )
