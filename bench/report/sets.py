"""Load the trials of run folders as sets, with their score and hardware."""

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.contract.plan import NOT_A_SUBMISSION, Plan
from bench.contract.schema import Device
from bench.errors import ConfigError
from bench.mlperf.gpu_count import NO_DEVICES
from bench.mlperf.result import NO_TARGET, Result, with_gpus
from bench.mlperf.score import Score, judged_trials, score_trials
from bench.mlperf.titles import task_of_mark
from bench.runs import names
from bench.runs.folder import plan_in
from bench.texts import counted

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSet:
    """The trials of one folder, or some of its files, and their score."""

    name: str
    score: Score
    plan: Plan | None
    num_gpus: int | None

    @property
    def results(self) -> tuple[Result, ...]:
        return self.score.results

    @property
    def has_target(self) -> bool:
        """Whether every log has a target; without one there is no score."""
        return all(result.has_target for result in self.results)

    @property
    def system(self) -> dict[str, Any]:
        return next((r.system for r in self.results if r.system), {})

    @property
    def why_not_benchmark(self) -> str | None:
        """Why the set does not count as the MLPerf benchmark named in its logs; None if it does."""
        if not self.has_target:
            return NO_TARGET
        if self.plan is not None and not self.plan.config.task.submittable:
            return f"{self.plan.config.task.name} is not an MLPerf benchmark: {NOT_A_SUBMISSION}"
        marked = (text for r in self.results for text in (r.platform, r.org) if text and NOT_A_SUBMISSION in text)
        return next(marked, None)

    @property
    def measured(self) -> str:
        """The benchmark or task that was measured; a run that is no submission gets its task's name."""
        if not self.has_target:
            shape = next((r.shape_of for r in self.results if r.shape_of), None)
            name = self.plan.config.task.name if self.plan else shape or "training"
            return f"{name}, random weights" if any(r.has_random_rows for r in self.results) else name
        if self.why_not_benchmark and self.plan is not None:
            return self.plan.config.task.name
        if self.why_not_benchmark and (task := task_of_mark(self.platform)):
            return task
        name = self.score.benchmark or "training"
        return f"{name} ({NOT_A_SUBMISSION})" if self.why_not_benchmark else name

    @property
    def trial_names(self) -> list[str]:
        """The K of each result_K.txt; the position in the list of files if K is not unique."""
        numbers = [re.search(r"(\d+)\D*$", Path(r.file).stem) for r in self.results]
        names = [match[1] for match in numbers if match]
        places = [str(place) for place in range(len(self.results))]
        return names if len(set(names)) == len(places) and max(map(len, names)) < 4 else places

    @property
    def platform(self) -> str | None:
        """The name of the system; None if only a placeholder was logged."""
        names = (self.score.platform, self.system.get("system_name"))
        return next((n for n in names if isinstance(n, str) and n and not re.search("PLACEHOLDER|UNKNOWN", n)), None)

    @property
    def accelerator(self) -> str | None:
        gpu = self.plan.config.cluster.gpu if self.plan else None
        logged = next((r.hyperparameters.get("accelerator") for r in self.results), None)
        names = (self.system.get("accelerator_model_name"), gpu and gpu.name, logged)
        return next((name for name in names if isinstance(name, str) and name not in ("", "cpu", NO_DEVICES)), None)

    @property
    def hardware(self) -> str | None:
        """The measured hardware, as named in figures and tables."""
        if self.plan is not None and self.plan.config.cluster.device is Device.cpu:
            return f"{self.platform or 'platform not logged'}, {counted(self.plan.world.num_ranks, 'CPU rank')}"
        if self.num_gpus is None:
            return self.platform
        return f"{self.num_gpus} × {self.accelerator or 'GPU'}" + (f", {self.platform}" if self.platform else "")


def load(paths: Sequence[Path], *, num_gpus: int | None = None) -> tuple[TrialSet, ...]:
    """Return one set per folder; consecutive files of the same folder form one set.

    Raises:
        ConfigError: a path does not exist, or num_gpus is less than 1.
        LogError: a folder has no results, or a log cannot be read.
    """
    if num_gpus is not None and num_gpus < 1:
        raise ConfigError(
            f"--num-gpus is {num_gpus}, but must be 1 or more", where="--num-gpus", fix="set --num-gpus to 1 or more"
        )
    for path in paths:
        if not path.exists():
            raise names.missing(path, files=True)
    sets: list[TrialSet] = []
    paths = [inner for path in paths for inner in sets_in(path)]
    for (folder, is_whole), group in itertools.groupby(paths, _folder):
        files = [] if is_whole else list(group)
        scored, plan = score_trials(judged_trials(files or folder)), plan_in(folder)
        _log.info("read %d results in %s, %s plan.json", scored.num_runs, folder, "with" if plan else "without")
        name = _name(folder.resolve(), scored.benchmark) + (f", {files[0].stem}" if len(files) == 1 else "")
        if any(name == other.name for other in sets):
            name = str(files[0] if len(files) == 1 else folder)
        gpus = _num_gpus(scored, plan, num_gpus)
        with_rates = replace(scored, results=tuple(with_gpus(result, gpus) for result in scored.results))
        sets.append(TrialSet(name=name, score=with_rates, plan=plan, num_gpus=gpus))
    return tuple(sets)


def sets_in(path: Path) -> list[Path]:
    """Return the path itself; for a folder of run folders, those with results."""
    if not path.is_dir() or any(path.glob("result_*.txt")):
        return [path]
    return sorted({log.parent for log in path.glob("*/result_*.txt")}) or [path]


def _folder(path: Path) -> tuple[Path, bool]:
    """Return the folder of a path's logs, and whether the path means all logs of it."""
    return (path, True) if path.is_dir() else (path.parent, False)


def _num_gpus(scored: Score, plan: Plan | None, stated: int | None) -> int | None:
    """Return the GPU count from the logs, else the plan, else the user; None for a run on CPUs."""
    if plan is None:
        return scored.num_gpus or stated
    return None if plan.config.cluster.device is Device.cpu else scored.num_gpus or plan.world.num_ranks


def _name(folder: Path, benchmark: str | None) -> str:
    """Return the folder's name; in results/<system>/<benchmark>, the name of the system."""
    return folder.parent.name if folder.name == benchmark else folder.name
