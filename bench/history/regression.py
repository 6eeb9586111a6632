"""A task's past: its runs on the same hardware with the same settings, and whether the newest ones are worse."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean

from bench.contract.plan import fingerprint
from bench.errors import ConfigError
from bench.history import facts
from bench.history.measured_trials import ProvenTrial
from bench.results.comparison import Pairing, compare
from bench.results.measurement import Measurement, higher_is_better, main

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """One run of a task."""

    folder: Path
    trials: tuple[ProvenTrial, ...]

    @property
    def began_ms(self) -> int:
        return self.trials[0].began_ms

    def values(self, name: str) -> list[float]:
        """Return a measurement of each trial that has it."""
        return [trial.measurements[name].value for trial in self.trials if name in trial.measurements]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The runs of one task on the same hardware with the same settings, the oldest first."""

    task: str
    hardware: str
    settings: str
    """A checksum of all settings, by which two pasts of a task are told apart."""
    runs: tuple[PastRun, ...]

    @property
    def settings_by_name(self) -> Mapping[str, str]:
        newest = self.runs[-1].trials[-1]
        return newest.planned or newest.logged

    def measurements(self, name: str | None = None) -> list[Measurement]:
        """Return what the newest run has of this name, or what it is judged by."""
        newest = self.runs[-1].trials[-1].measurements
        return [one for each, one in newest.items() if each == name] if name else main(newest)


class Change(StrEnum):
    """What became of a task."""

    regression = "regression"
    none = "no regression"
    undecided = "undecided"
    not_judged = "not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether the newest runs are worse than those before."""

    past: Past
    measurement: str
    change: Change
    text: str


def pasts(trials: Iterable[ProvenTrial]) -> list[Past]:
    """Return the pasts of all tasks, by task, then the one that was run last."""
    found: dict[tuple[str, str, str], dict[Path, list[ProvenTrial]]] = {}
    for trial in trials:
        settings = fingerprint(dict(trial.planned or trial.logged))[:8]
        key = (trial.task, facts.hardware(trial.facts), settings)
        found.setdefault(key, {}).setdefault(trial.folder, []).append(trial)
    every = [
        Past(
            task=task,
            hardware=hardware,
            settings=settings,
            runs=tuple(PastRun(folder=folder, trials=tuple(group)) for folder, group in runs.items()),
        )
        for (task, hardware, settings), runs in found.items()
    ]
    return sorted(every, key=lambda past: (past.task, -past.runs[-1].began_ms))


def apart(past: Past, others: Iterable[Past]) -> str:
    """Return the settings that tell a past from others of its task on any hardware; empty where there are none."""
    same = [other.settings_by_name for other in others if other.task == past.task]
    own = past.settings_by_name
    found = [f"{name}={value}" for name, value in own.items() if any(value != other.get(name, value) for other in same)]
    return " ".join(found[:_MOST]) + (f" and {len(found) - _MOST} more" if found[_MOST:] else "")


_MOST = 4


def of_task(every: Sequence[Past], task: str | None, *, where: Path) -> list[Past]:
    """Return the pasts of one task, or all of them.

    Raises:
        ConfigError: there is none.
    """
    known = ", ".join(dict.fromkeys(past.task for past in every))
    found = [past for past in every if task in (None, past.task)]
    if not found:
        what = f"no proven run of {task}" if task else "no proven run"
        raise ConfigError(
            what, where=str(where), fix=f"there are runs of {known}" if known else "set LOGDIR, or run one"
        )
    return found


def check_measured(pasts: Sequence[Past], name: str | None) -> None:
    """Raise ConfigError if no run has measured what is asked for."""
    known = dict.fromkeys(each for past in pasts for run in past.runs for t in run.trials for each in t.measurements)
    if name not in (None, *known):
        raise ConfigError(f"{name} was not measured", where="--measurement", fix=f"name one of {', '.join(known)}")


def judge_all(
    pasts: Iterable[Past], name: str | None, *, tolerance: float, newest: int = 1, earlier: int = 10
) -> list[Judgement]:
    """Return the judgements of each past by a measurement, or by all that it is judged by; at least one of each."""
    found: list[Judgement] = []
    for past in pasts:
        by = past.measurements(name)
        found += [judge(past, one, tolerance=tolerance, newest=newest, earlier=earlier) for one in by]
        if not by:
            text = "not measured by the newest run" if name else "no main measurement: name one with --measurement"
            found.append(Judgement(past=past, measurement=name or "", change=Change.not_judged, text=text))
    return found


def judge(past: Past, measurement: Measurement, *, tolerance: float, newest: int = 1, earlier: int = 10) -> Judgement:
    """Return whether the newest runs are worse than the ones before them, by more than a tolerance (a share).

    A run is one value, the mean of its trials: trials of one run share nodes and hour. Several newest runs are compared
    by Welch's t-test, a single one with the prediction interval of the earlier ones.
    """
    values = [fmean(found) for run in past.runs if (found := run.values(measurement.name))]
    new, old = values[-newest:], values[:-newest][-earlier:]
    change, text = _judged(new, old, measurement, tolerance=tolerance)
    return Judgement(past=past, measurement=measurement.name, change=change, text=text)


def _judged(
    new: Sequence[float], old: Sequence[float], measurement: Measurement, *, tolerance: float
) -> tuple[Change, str]:
    """Return the change and what it stands on: the change of the measurement in percent, with its 95 % interval."""
    if not new or len(old) < _FEWEST:
        return Change.not_judged, f"{len(old)} earlier run(s): it takes {_FEWEST} to know how far runs lie apart"
    if not all(0 < value < math.inf for value in (*new, *old)):
        return Change.not_judged, "a change in percent takes positive numbers"
    ratio, low, high = _against(new, old, measurement)
    sign = -1 if higher_is_better(measurement) else 1
    worse, ends = sign * (ratio - 1), sorted((sign * (low - 1), sign * (high - 1)))
    runs = f"{len(new)} run{'s' if new[1:] else ''} against {len(old)} earlier ones"
    text = f"{100 * (ratio - 1):+.1f} % ({100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %), {runs}"
    if ends[0] > 0 and worse > tolerance:
        return Change.regression, text
    return (Change.none if ends[1] <= tolerance else Change.undecided), text


_FEWEST = 2


def _against(new: Sequence[float], old: Sequence[float], measurement: Measurement) -> tuple[float, float, float]:
    """Return the ratio of new to old, and its 95 % interval."""
    if len(new) == 1:
        from bench.results import comparison

        change, half_width = comparison.of_one(math.log(new[0]), [math.log(value) for value in old], CONFIDENCE)
        return math.exp(change), math.exp(change - half_width), math.exp(change + half_width)
    found = compare(
        new,
        old,
        names=("new", "old"),
        measurement=measurement.name,
        higher_is_better=higher_is_better(measurement),
        confidence=CONFIDENCE,
        pairing=Pairing.none,
    )
    assert found.ratio is not None and found.low is not None and found.high is not None
    return found.ratio, found.low, found.high
