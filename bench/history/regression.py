"""Detect regressions: compare the newest runs of a task with earlier runs on the same hardware and settings."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean

from bench.contract.plan import fingerprint
from bench.errors import ConfigError
from bench.history import facts
from bench.history.measured_trials import ValidTrial
from bench.results.measurement import Measurement, higher_is_better, main

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRun:
    """One run of a task."""

    folder: Path
    trials: tuple[ValidTrial, ...]

    @property
    def began_ms(self) -> int:
        return self.trials[0].began_ms

    def values(self, name: str) -> list[float]:
        """Return the values of a measurement, one for each trial that has it."""
        return [trial.measurements[name].value for trial in self.trials if name in trial.measurements]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskHistory:
    """The runs of one task on the same hardware with the same settings, the oldest first."""

    task: str
    hardware: str
    settings: str
    """A checksum of all settings."""
    runs: tuple[HistoryRun, ...]

    @property
    def settings_by_name(self) -> Mapping[str, str]:
        newest = self.runs[-1].trials[-1]
        return newest.planned or newest.logged

    def measurements(self, name: str | None = None) -> list[Measurement]:
        """Return the measurement of this name in the newest run; without a name its main measurements."""
        newest = self.runs[-1].trials[-1].measurements
        return [one for each, one in newest.items() if each == name] if name else main(newest)


class Change(StrEnum):
    """The verdict on the newest runs of a task."""

    regression = "regression"
    none = "no regression"
    undecided = "undecided"
    not_judged = "not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether the newest runs are worse than earlier runs."""

    task_history: TaskHistory
    measurement: str
    change: Change
    text: str


def histories(trials: Iterable[ValidTrial]) -> list[TaskHistory]:
    """Return the histories of all tasks, ordered by task; the one with the newest run comes first."""
    groups: dict[tuple[str, str, str], dict[Path, list[ValidTrial]]] = {}
    for trial in trials:
        settings = fingerprint(dict(trial.planned or trial.logged))[:8]
        key = (trial.task, facts.hardware(trial.facts), settings)
        groups.setdefault(key, {}).setdefault(trial.folder, []).append(trial)
    every = [
        TaskHistory(
            task=task,
            hardware=hardware,
            settings=settings,
            runs=tuple(HistoryRun(folder=folder, trials=tuple(group)) for folder, group in runs.items()),
        )
        for (task, hardware, settings), runs in groups.items()
    ]
    return sorted(every, key=lambda task_history: (task_history.task, -task_history.runs[-1].began_ms))


def distinguishing_settings(task_history: TaskHistory, others: Iterable[TaskHistory]) -> str:
    """Return the settings in which a history differs from others of its task on any hardware; may be empty."""
    same = [other.settings_by_name for other in others if other.task == task_history.task]
    own = task_history.settings_by_name
    differing = [
        f"{name}={value}" for name, value in own.items() if any(value != other.get(name, value) for other in same)
    ]
    return " ".join(differing[:_MOST]) + (f" and {len(differing) - _MOST} more" if differing[_MOST:] else "")


_MOST = 4


def of_task(every: Sequence[TaskHistory], task: str | None, *, where: Path) -> list[TaskHistory]:
    """Return the histories of one task, or all of them.

    Raises:
        ConfigError: there are none.
    """
    known = ", ".join(dict.fromkeys(task_history.task for task_history in every))
    selected = [task_history for task_history in every if task in (None, task_history.task)]
    if not selected:
        what = f"there is no valid run of {task}" if task else "there is no valid run"
        fix = "set LOGDIR to the folder of your runs, or launch a run"
        if known:
            fix = f"choose a task that has valid runs: {known}"
        raise ConfigError(what, where=str(where), fix=fix)
    return selected


def check_measured(histories: Sequence[TaskHistory], name: str | None) -> None:
    """Raise ConfigError if no run has the requested measurement."""
    known = dict.fromkeys(
        each for task_history in histories for run in task_history.runs for t in run.trials for each in t.measurements
    )
    if name not in (None, *known):
        raise ConfigError(
            f"no run has the measurement {name}",
            where="--measurement",
            fix=f"use one of the measurements {', '.join(known)}",
        )


def judge_all(
    histories: Iterable[TaskHistory], name: str | None, *, tolerance: float, newest: int = 1, earlier: int = 10
) -> list[Judgement]:
    """Judge each history by a measurement or by its main measurements; return at least one judgement of each."""
    judgements: list[Judgement] = []
    for task_history in histories:
        by = task_history.measurements(name)
        judgements += [judge(task_history, one, tolerance=tolerance, newest=newest, earlier=earlier) for one in by]
        if not by:
            text = (
                f"the newest run has no measurement {name}"
                if name
                else "the newest run has no main measurement: choose one with --measurement NAME"
            )
            judgements.append(
                Judgement(task_history=task_history, measurement=name or "", change=Change.not_judged, text=text)
            )
    return judgements


def judge(
    task_history: TaskHistory, measurement: Measurement, *, tolerance: float, newest: int = 1, earlier: int = 10
) -> Judgement:
    """Return whether the newest runs are worse than earlier runs by more than a tolerance (a share).

    It is a regression if the whole 95 % interval of the change is worse than the tolerance, and none if no part of it
    is; else it is undecided. The value of a run is the mean of its trials, which share nodes and time. The interval of
    several newest runs is that of Welch's t-test, that of a single one is the prediction interval of the earlier runs.
    """
    values = [fmean(of_run) for run in task_history.runs if (of_run := run.values(measurement.name))]
    new, old = values[-newest:], values[:-newest][-earlier:]
    change, text = _judged(new, old, measurement, tolerance=tolerance)
    return Judgement(task_history=task_history, measurement=measurement.name, change=change, text=text)


def _judged(
    new: Sequence[float], old: Sequence[float], measurement: Measurement, *, tolerance: float
) -> tuple[Change, str]:
    """Return the verdict, and the change of the measurement in percent with its 95 % interval."""
    if not new or len(old) < _FEWEST:
        return (
            Change.not_judged,
            f"earlier runs: {len(old)}; an estimate of the run-to-run variation needs {_FEWEST} or more: repeat the "
            f"run",
        )
    if not all(0 < value < math.inf for value in (*new, *old)):
        return Change.not_judged, "a value is zero, negative or not finite, so there is no change in percent"
    ratio, low, high = _against(new, old)
    sign = -1 if higher_is_better(measurement) else 1
    least, most = sorted((sign * (low - 1), sign * (high - 1)))
    runs = f"{len(new)} run{'s' if new[1:] else ''} compared with {len(old)} earlier runs"
    text = f"{100 * (ratio - 1):+.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %), {runs}"
    if least > tolerance:
        return Change.regression, text
    return (Change.none if most <= tolerance else Change.undecided), text


_FEWEST = 2


def _against(new: Sequence[float], old: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of new to old, and its 95 % interval."""
    from bench.results.comparison import of_one, of_sets

    logs, earlier = ([math.log(value) for value in values] for values in (new, old))
    if len(logs) == 1:
        change, half_width = of_one(logs[0], earlier, CONFIDENCE)
        low, high = change - half_width, change + half_width
    else:
        import numpy as np

        estimate = of_sets(np.array(logs), np.array(earlier), bound=0.0, confidence=CONFIDENCE)
        change, low, high = float(estimate.difference), float(estimate.low), float(estimate.high)
    return math.exp(change), math.exp(low), math.exp(high)
