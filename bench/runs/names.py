"""Find runs by what a user types: a path, a name in the folder of runs, a part of a name, `latest`, or STUDY/ARM.

The name of a run is that of its folder; the name of a study's run is STUDY/ARM.BLOCK. This module reads no file of a
run but job.json, to leave out the folders of shared jobs.
"""

import difflib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.contract import atomic_files
from bench.contract.run_files import JOB, LEDGER, PLAN
from bench.errors import ConfigError
from bench.runs.folder import short
from bench.texts import control_character, counted

LATEST = "latest"
_LATEST = re.compile(r"latest(?:~(\d{1,9}))?")
STUDIES = "studies"
"""The folder of all studies, in the folder of runs."""
STUDY = "study.yaml"
"""The file in the folder of a study, next to the run folders ARM.BLOCK."""
BLOCK = re.compile(r"(?P<arm>.+?)(\.b\d+)?\.(?P<block>\d+)")
_DATE_AND_ID = re.compile(r"^\d{8}-\d{6}-|-[0-9a-f]{4}$")
_MOST = 8
"""How many names a message lists."""
LIST = "`runstop runs` lists all runs"
_log = logging.getLogger(__name__)


def root() -> Path:
    """Return the folder that holds the run folders."""
    return Path(os.environ.get("LOGDIR") or "runs")


def require_root(folder: Path) -> None:
    """Raise ConfigError unless a folder of runs exists."""
    if not folder.is_dir():
        fix = "give the folder of your runs, or set LOGDIR"
        raise ConfigError("this folder does not exist", where=str(folder), fix=fix)


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run folder."""
    return any(os.path.lexists(folder / name) for name in (JOB, LEDGER, PLAN))


def is_shared_job(folder: Path) -> bool:
    """Return whether a folder is that of a shared job or an array, whose runs have folders of their own next to it."""
    return not (folder / LEDGER).exists() and "runs" in atomic_files.read_object(folder / JOB)


def below(folder: Path) -> list[Path]:
    """Return the run folders in a folder, the newest first: the order in which they were launched."""
    matches = dict.fromkeys(path.parent for name in (JOB, LEDGER, PLAN) for path in folder.glob(f"*/{name}"))
    return sorted(
        (one for one in matches if not is_shared_job(one)), key=lambda one: (launched_s(one), one), reverse=True
    )


def launched_s(folder: Path) -> float:
    """Return when a run was launched, in seconds since 1970: its plan is written then. 0 if it is not known."""
    for name in (PLAN, JOB, LEDGER):
        with suppress(OSError):
            return (folder / name).stat().st_mtime
    return 0.0


def arm_of(folder: Path) -> str:
    """Return the arm of a run folder in a study; empty for any other folder."""
    match = BLOCK.fullmatch(folder.name)
    return match["arm"] if match and (folder.parent / STUDY).exists() else ""


def one(text: str | Path, *, folder: Path | None = None) -> Path:
    """Return the folder of one run; `folder` holds the run folders (default: `root`).

    Raises:
        ConfigError: as `several`, or the text means several runs.
    """
    matches = several(text, folder=folder)
    if matches[1:]:
        raise _ambiguous(str(text), matches, folder or root())
    return matches[0]


def several(text: str | Path, *, folder: Path | None = None, files: bool = False, whole: bool = False) -> list[Path]:
    """Return the folders of the runs that a text means: one, or all runs of a study's arm.

    An existing path is returned as it is, also if it is not a run: the caller says what it needs. With `files` the
    caller reads files, too, and the message says so; with `whole` a part of a name is not enough.

    Raises:
        ConfigError: there is no such run, or the text is a part of several names.
    """
    text, folder = str(text), folder or root()
    if os.path.lexists(text):
        return [Path(text)]
    if match := _LATEST.fullmatch(text):
        return [_launched(text, int(match[1] or 0), folder)]
    places = _Places.in_folder(folder)
    named = places.named(text)
    if named:
        return named
    parts = [] if whole else places.with_part(text)
    if parts[1:]:
        raise _ambiguous(text, parts, places.folder)
    if not parts:
        raise _none(text, places, files=files)
    _log.info("%s is %s", text, parts[0])
    return parts


def _launched(text: str, place: int, folder: Path) -> Path:
    """Return the run that was launched last, or that many launches before it."""
    runs = below(folder)
    if not runs:
        fix = "give the path of a run folder, or set LOGDIR to the folder of your runs"
        raise ConfigError("there are no runs in this folder", where=str(folder), fix=fix)
    if place >= len(runs):
        what = f"{text} means run {place + 1}, counted from the newest, but the folder has {counted(len(runs), 'run')}"
        oldest = f"{LATEST}~{len(runs) - 1}" if len(runs) > 1 else LATEST
        raise ConfigError(what, where=str(folder), fix=f"use {oldest} for the oldest run; {LIST}")
    _log.info("%s is %s", text, runs[place])
    return runs[place]


@dataclass(frozen=True, slots=True)
class _Places:
    """The runs in a folder, and those of the studies in it, by name."""

    folder: Path
    runs: dict[str, Path]
    of_studies: dict[str, Path]

    @classmethod
    def in_folder(cls, folder: Path) -> "_Places":
        return cls(folder, {one.name: one for one in below(folder)}, dict(_of_studies(folder)))

    def named(self, text: str) -> list[Path]:
        """Return the run of this name, or the runs of a study's arm; empty if there are none."""
        text = text.removesuffix("/")
        if run := self.runs.get(text) or self.of_studies.get(text):
            return [run]
        study, _, arm = text.removeprefix(f"{STUDIES}/").rpartition("/")
        of_arm = [run for run in self.of_studies.values() if study and arm in (arm_of(run), run.name)]
        return [run for run in of_arm if run.parent.name == study] or self._on_one_cluster(text, study, of_arm)

    def _on_one_cluster(self, text: str, study: str, runs: list[Path]) -> list[Path]:
        """Return the runs in the folder NAME-CLUSTER of a study that is given by NAME."""
        matches = [run for run in runs if run.parent.name.startswith(f"{study}-")]
        if len({run.parent for run in matches}) > 1:
            raise _ambiguous(text, matches, self.folder)
        return matches

    def with_part(self, text: str) -> list[Path]:
        """Return the runs whose names contain a text, in capital or small letters."""
        names = self.runs | self.of_studies
        return [run for name, run in names.items() if text.lower() in name.lower()]

    def near(self, text: str) -> list[str]:
        """Return the names that are most like a text."""
        likeness = {name: _likeness(text.lower(), name.lower()) for name in (*self.runs, *self.of_studies)}
        return sorted((name for name in likeness if likeness[name] > 0.6), key=lambda name: -likeness[name])[:3]


def _likeness(text: str, name: str) -> float:
    """Return how alike a text and a name are, with or without the date and the id of the name: 1 if they are equal."""
    return max(difflib.SequenceMatcher(None, text, other).ratio() for other in (name, _DATE_AND_ID.sub("", name)))


def _of_studies(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the runs of all studies in a folder, by STUDY/ARM.BLOCK."""
    for path in sorted(folder.glob(f"{STUDIES}/*/{STUDY}")):
        for run in sorted(below(path.parent)):
            yield f"{path.parent.name}/{run.name}", run


def name_of(run: Path) -> str:
    """Return the name by which a run is found: STUDY/ARM.BLOCK in a study, else that of its folder."""
    return f"{run.parent.name}/{run.name}" if (run.parent / STUDY).exists() else run.name


def completions(prefix: str, *, folder: Path | None = None) -> list[str]:
    """Return the names of runs that begin with a text, the newest first, and `latest`."""
    places = _Places.in_folder(folder or root())
    names = [*([LATEST] if places.runs else []), *places.runs, *places.of_studies]
    return [name for name in names if name.startswith(prefix)]


def unprintable(path: Path) -> ConfigError | None:
    """Return the error of a path whose characters would control the terminal or the page that shows it."""
    if not control_character(str(path)):
        return None
    fix = "rename the folder: control characters can make a terminal show a wrong name"
    return ConfigError("the path contains control characters", where=str(path), fix=fix)


def not_a_run(folder: Path) -> ConfigError:
    """Return the error of a path that is not a run folder."""
    if not folder.exists():
        what = "there is no such run folder"
    else:
        what = f"this {'folder' if folder.is_dir() else 'file'} is not a run folder"
    fix = f"give a run folder; {LIST}"
    if not folder.is_dir() and is_run(folder.parent):
        fix = f"give the folder of the run: {short(folder.parent)}"
    return ConfigError(what, where=str(folder), fix=fix)


def missing(text: str | Path, *, files: bool = False) -> ConfigError:
    """Return the error of a text that means no run; with `files` the caller reads files, too."""
    return _none(str(text), _Places.in_folder(root()), files=files)


def _none(text: str, places: _Places, *, files: bool) -> ConfigError:
    """Return the error of a text that means no run, with what was searched and near names."""
    what = f"no run {'or file ' if files else ''}has this name: {text}"
    searched = f"{counted(len(places.runs), 'run')} in {short(places.folder)}"
    if not places.folder.is_dir():
        searched = f"{short(places.folder)} (LOGDIR), which does not exist"
    in_studies = f", {counted(len(places.of_studies), 'run')} of studies" if places.of_studies else ""
    near = places.near(text)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    fix = f"{meant}{LIST}" if places.runs else f"{meant}give the path of a run folder, or set LOGDIR"
    return ConfigError(what, where=f"this path, and {searched}{in_studies}", fix=fix)


def _ambiguous(text: str, runs: list[Path], folder: Path) -> ConfigError:
    names = [name_of(run) for run in runs]
    more = f" and {len(names) - _MOST} more" if names[_MOST:] else ""
    return ConfigError(
        f"{text} means {len(names)} runs",
        where=str(folder),
        fix=f"give the whole name of one: {', '.join(names[:_MOST])}{more}",
    )
