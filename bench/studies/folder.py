"""A study's folder: study.yaml (as it was composed), arms.json (what was planned), and one run folder for each run.

    LOGDIR/studies/NAME-CLUSTER/
      study.yaml  arms.json  not_started.json
      ARM.BLOCK/              the run of an arm in a block: an ordinary run folder; blocks count from 1
      ARM.bSIZE.BLOCK/        the same with a micro-batch of SIZE, where the study looks for the largest one

The logs in the run folders are the truth about what was measured.
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
from bench.results.published import PublishedTable
from bench.results.study import PlannedArm
from bench.runs.folder import NOT_OTHERS, require_ours, short
from bench.studies import arms as arms_of
from bench.studies import checks, library
from bench.studies.arms import Arm
from bench.studies.spec import Part, Study

STUDIES = "studies"
STUDY, ARMS, NOT_STARTED = "study.yaml", "arms.json", "not_started.json"
NEUTRAL = ("launch.wait", "launch.force", "launch.trackers", "launch.attempts", "walltime", "cluster.paths.logs")
"""Overrides that may change between two calls, since they change nothing of what is measured."""


class Kept(Part, frozen=True, kw_only=True):
    """What study.yaml holds: all that reading the study later takes, whatever becomes of conf/."""

    name: str
    cluster: str
    words: tuple[str, ...]
    config_dir: str | None = None
    runs: int | None = None
    """Of each arm, where the command line said so; `study` has them, too."""
    study: Study
    publications: dict[str, PublishedTable]

    @property
    def command(self) -> str:
        """What one types to go on with the study."""
        runs = ["--runs", str(self.runs)] if self.runs else []
        site = ["--config-dir", self.config_dir] if self.config_dir else []
        return shlex.join(["python", "-m", "bench", "study", self.name, *self.words, *runs, *site])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunName:
    """One run of a study: which arm, in which block (from 0), with which micro-batch where that is searched."""

    arm: Arm
    block: int
    batch: int | None = None

    def within(self, folder: Path) -> Path:
        size = "" if self.batch is None else f".b{self.batch}"
        return folder / f"{self.arm.slug}{size}.{self.block + 1}"


def path(logs: Path, *, name: str, cluster: str) -> Path:
    """Return where a study on a cluster is kept."""
    return logs / STUDIES / f"{name}-{cluster}"


def kept(folder: Path) -> Kept:
    """Return what a study's folder says of it.

    Raises:
        ConfigError: it is not a study's folder.
    """
    if not (folder / STUDY).exists():
        fix = "leave out --table to start it, or name the cluster on which it ran; --list shows the studies"
        raise ConfigError("no study in this folder", where=str(folder), fix=fix)
    found = library.load_yaml(folder / STUDY, Kept)
    checks.check_runs(found.study.runs, where=f"{folder / STUDY}: runs")
    return found


def planned(folder: Path) -> dict[str, PlannedArm]:
    """Return what was planned, by arm; empty where that cannot be read."""
    raw = atomic_files.read(folder / ARMS)
    try:
        return {arm.name: arm for arm in msgspec.convert(raw, list[PlannedArm])}
    except msgspec.ValidationError:
        return {}


def not_started(folder: Path) -> dict[str, str]:
    """Return why runs that were asked for have no folder, by the name that it would have."""
    return {name: str(reason) for name, reason in atomic_files.read_object(folder / NOT_STARTED).items()}


def note_not_started(folder: Path, reasons: dict[str, str]) -> None:
    masked_json.write(folder / NOT_STARTED, reasons)


@contextmanager
def opened(folder: Path, now: Kept, arms: Sequence[PlannedArm]) -> Iterator[None]:
    """Hold a study's folder for the block: nobody else runs the study, and its runs are those of the same arms.

    Raises:
        ConfigError: another process runs it, or it is that of other arms.
    """
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        missing.mkdir(mode=NOT_OTHERS, exist_ok=True)
    require_ours(folder.resolve())
    fix = f"wait for it, or end it with Ctrl-C; python -m bench study {short(folder)} --table shows where it stands"
    with run_lock.driving(folder, noun="study", fix=fix):
        if (folder / STUDY).exists():
            _check_same(folder, now, arms)
        library.dump_yaml(folder / STUDY, msgspec.to_builtins(now))
        masked_json.write(folder / ARMS, [_plain(arm) for arm in arms])
        yield


def _plain(arm: PlannedArm) -> dict[str, Any]:
    return dict(msgspec.to_builtins(dataclasses.asdict(arm)))


def _check_same(folder: Path, now: Kept, arms: Sequence[PlannedArm]) -> None:
    """Raise ConfigError if an arm that has runs is not what it was when they were made."""
    before, was = kept(folder), planned(folder)
    old, new = _settings(before), _settings(now)
    for arm in arms:
        if arm.name not in old or not any(folder.glob(f"{arms_of.slug(arm.name)}.*")):
            continue
        if what := _difference(old[arm.name], new[arm.name]):
            raise _changed(f"arm {arm.name!r} is now {what}", folder)
        prints = [one.fingerprint for one in (was.get(arm.name), arm) if one is not None and one.fingerprint]
        if prints[1:] and prints[0] != prints[1]:
            raise _changed(f"arm {arm.name!r} is planned differently: conf/ or this program has changed", folder)


def _settings(kept: Kept) -> dict[str, list[str]]:
    """Return, by arm, all that decides what its runs measure."""
    study = kept.study
    length = [f"{name}={value}" for name, value in (("window", study.window), ("max_batch", study.max_batch)) if value]
    return {
        arm.name: [
            *(word for word in (*arm.overrides, *kept.words) if word.lstrip("+~").partition("=")[0] not in NEUTRAL),
            *length,
            *([f"calculated={arm.calculated}"] if arm.calculated else []),
        ]
        for arm in arms_of.of(study, where=STUDY)
    }


def _difference(old: Sequence[str], new: Sequence[str]) -> str:
    """Return what is there no more and what is new; empty where nothing differs."""
    if list(old) == list(new):
        return ""
    changes = {
        "without": [word for word in old if word not in new],
        "with": [word for word in new if word not in old],
    }
    return ", ".join(f"{how} {' '.join(words)}" for how, words in changes.items() if words) or "ordered differently"


def _changed(what: str, folder: Path) -> ConfigError:
    return ConfigError(
        f"the study has changed since its runs were made: {what}",
        where=str(folder),
        fix=f"undo the change, move {short(folder)} away, or set LOGDIR to another folder",
        rule="CFG-05",
    )
