"""Show past results of tasks, and whether their newest runs are a regression."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from time import localtime, strftime

from bench.console.comparison import number
from bench.history.regression import CONFIDENCE, HistoryRun, Judgement, TaskHistory, distinguishing_settings
from bench.report.tables import TextTable
from bench.results.measurement import Measurement, higher_is_better
from bench.runs import tags
from bench.runs.folder import short

_TASKS = (
    *("task", "hardware", "settings", "runs", "trials", "first", "last", "measurement", "last value", "best value"),
    "differing settings",
)
_RUNS = ("began", "run", "trials", "value", "± of trials", "tags", "changed since the previous run")
_CHECKED = ("task", "hardware", "settings", "measurement", "verdict", "change")
_NO_CHANGE = ("nodes",)
"""Facts that differ from run to run without affecting speed."""


def list_sheet(root: Path, histories: Sequence[TaskHistory], name: str | None) -> TextTable:
    """Return one row for each task, hardware, settings and measurement: the named one, or the main ones."""
    rows = []
    pairs = [(each, measurement) for each in histories for measurement in shown_measurements(each, name)]
    for task_history, measurement in pairs:
        values = _values(task_history, measurement) if measurement else []
        best = max if measurement and higher_is_better(measurement) else min
        ends = (values[-1], best(values)) if values else ()
        num_trials = sum(len(run.trials) for run in task_history.runs)
        shown = [number(value, like=values) for value in ends] or ["", ""]
        days = _day(task_history.runs[0]), _day(task_history.runs[-1])
        counts = str(len(task_history.runs)), str(num_trials)
        measured = (_title(measurement) if measurement else "", *shown)
        rows.append(
            (
                task_history.task,
                task_history.hardware,
                task_history.settings,
                *counts,
                *days,
                *measured,
                distinguishing_settings(task_history, histories),
            )
        )
    caption = f"to list the runs of a task: runstop history {shlex.quote(rows[0][0])}" if rows else ""
    return TextTable(f"valid runs in {short(root)}", rows, columns=_TASKS, caption=caption)


def shown_measurements(task_history: TaskHistory, name: str | None) -> Sequence[Measurement | None]:
    """Return the measurements to show: the named one, or the main ones; (None,) if there is none."""
    return task_history.measurements(name) or (None,)


def runs_sheet(task_history: TaskHistory, measurement: Measurement | None) -> TextTable:
    """Return the runs of a task with one measurement, the newest first."""
    like = _values(task_history, measurement) if measurement else []
    rows = []
    for run, before in zip(reversed(task_history.runs), [*reversed(task_history.runs[:-1]), None], strict=True):
        values = run.values(measurement.name) if measurement else []
        rows.append(
            (
                strftime("%Y-%m-%d %H:%M", localtime(run.began_ms / 1000)),
                run.folder.name,
                str(len(run.trials)),
                number(fmean(values), like=like) if values else "",
                number(stdev(values), like=like) if values[1:] else "",
                ", ".join(tags.read(run.folder).tags),
                _changes(before, run) if before else "",
            )
        )
    filled = [place for place in range(len(_RUNS)) if place < 4 or any(row[place] for row in rows)]
    title = f"{task_history.task} on {task_history.hardware}, settings {task_history.settings}"
    if measurement:
        title += f": {_title(measurement)}, {'higher' if higher_is_better(measurement) else 'lower'} is better"
    return TextTable(
        title,
        [tuple(row[place] for place in filled) for row in rows],
        columns=[_RUNS[place] for place in filled],
    )


def judgement_sheet(judgements: Sequence[Judgement], *, tolerance: float) -> TextTable:
    rows = [
        (j.task_history.task, j.task_history.hardware, j.task_history.settings, j.measurement, str(j.change), j.text)
        for j in judgements
    ]
    counts = Counter(str(j.change) for j in judgements)
    caption = (
        f"{', '.join(f'{count} {change}' for change, count in counts.items())}. A regression is a change whose "
        f"whole {100 * CONFIDENCE:g} % interval is worse than the tolerance of {100 * tolerance:g} %."
    )
    return TextTable("the newest runs compared with earlier runs", rows, columns=_CHECKED, caption=caption)


def _values(task_history: TaskHistory, measurement: Measurement) -> list[float]:
    return [fmean(values) for run in task_history.runs if (values := run.values(measurement.name))]


def _title(measurement: Measurement) -> str:
    return f"{measurement.name} ({measurement.unit})" if measurement.unit else measurement.name


def _day(run: HistoryRun) -> str:
    return strftime("%Y-%m-%d", localtime(run.began_ms / 1000))


def _changes(before: HistoryRun, run: HistoryRun) -> str:
    """Return which software and hardware changed between two runs."""
    old, new = before.trials[-1].facts, run.trials[-1].facts
    names = [name for name in dict.fromkeys((*old, *new)) if name not in _NO_CHANGE and old.get(name) != new.get(name)]
    return "; ".join(f"{name} {_short(old.get(name))} → {_short(new.get(name))}" for name in names)


def _short(value: str | None) -> str:
    """Return a fact's value; a checksum is cut to 10 digits."""
    text = value or "unknown"
    tail = "-dirty" if text.endswith("-dirty") else ""
    return f"{text[:10]}…{tail}" if len(text) > 24 and " " not in text else text
