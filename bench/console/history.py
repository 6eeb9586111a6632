"""Show what tasks measured in the past, and whether their newest runs are worse."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from time import localtime, strftime

from bench import masked_json
from bench.console.comparison import number
from bench.history.regression import CONFIDENCE, Judgement, Past, PastRun, apart
from bench.report.tables import TextTable
from bench.results.measurement import Measurement, higher_is_better
from bench.runs.folder import short

_TASKS = (
    *("task", "hardware", "settings", "runs", "trials", "first", "last", "measurement", "last value", "best value"),
    "what tells these settings apart",
)
_RUNS = ("began", "run", "trials", "value", "± of trials", "changed since the run before")
_JUDGED = ("task", "hardware", "settings", "measurement", "verdict", "change")
_NO_CHANGE = ("nodes",)
"""Facts that differ from run to run and say nothing of speed."""


def list_sheet(root: Path, pasts: Sequence[Past], name: str | None) -> TextTable:
    """Return one line for each task, hardware, settings and measurement: that of this name, or the main ones."""
    rows = []
    for past, of in ((each, of) for each in pasts for of in shown_of(each, name)):
        values = _values(past, of) if of else []
        ends = (values[-1], (max if of and higher_is_better(of) else min)(values)) if values else ()
        num_trials = sum(len(run.trials) for run in past.runs)
        shown = [number(value, like=values) for value in ends] or ["", ""]
        days = _day(past.runs[0]), _day(past.runs[-1])
        counts = str(len(past.runs)), str(num_trials)
        measured = (_title(of) if of else "", *shown)
        rows.append((past.task, past.hardware, past.settings, *counts, *days, *measured, apart(past, pasts)))
    caption = "python -m bench history TASK lists its runs"
    return TextTable(f"proven runs in {short(root)}", rows, columns=_TASKS, caption=caption)


def shown_of(past: Past, name: str | None) -> Sequence[Measurement | None]:
    """Return what is shown of a past; None, once, where it has nothing of this name, and no main measurement."""
    return past.measurements(name) or (None,)


def past_sheet(past: Past, of: Measurement | None) -> TextTable:
    """Return the runs of a past by one measurement, the newest first."""
    like = _values(past, of) if of else []
    rows = []
    for run, before in zip(reversed(past.runs), [*reversed(past.runs[:-1]), None], strict=True):
        values = run.values(of.name) if of else []
        rows.append(
            (
                strftime("%Y-%m-%d %H:%M", localtime(run.began_ms / 1000)),
                run.folder.name,
                str(len(run.trials)),
                number(fmean(values), like=like) if values else "",
                number(stdev(values), like=like) if values[1:] else "",
                _changes(before, run) if before else "",
            )
        )
    filled = [place for place in range(len(_RUNS)) if place < 4 or any(row[place] for row in rows)]
    measured = f": {_title(of)}, {'higher' if higher_is_better(of) else 'lower'} is better" if of else ""
    return TextTable(
        f"{past.task} on {past.hardware}, settings {past.settings}{measured}",
        [tuple(row[place] for place in filled) for row in rows],
        columns=[_RUNS[place] for place in filled],
    )


def judgement_sheet(judgements: Sequence[Judgement], *, tolerance: float) -> TextTable:
    """Return what became of each task."""
    rows = [(j.past.task, j.past.hardware, j.past.settings, j.measurement, str(j.change), j.text) for j in judgements]
    counts = Counter(str(j.change) for j in judgements)
    caption = (
        f"{', '.join(f'{count} {change}' for change, count in counts.items())}. A regression is "
        f"proven ({100 * CONFIDENCE:g} %) and above the tolerance of {100 * tolerance:g} %."
    )
    return TextTable("the newest runs against the ones before", rows, columns=_JUDGED, caption=caption)


def run_json(past: Past, run: PastRun) -> str:
    """Return a run as one object of strict JSON."""
    names = dict.fromkeys(name for trial in run.trials for name in trial.measurements)
    content = {
        "task": past.task,
        "hardware": past.hardware,
        "settings": past.settings,
        "run": str(run.folder),
        "began_ms": run.began_ms,
        "trials": [trial.trial for trial in run.trials],
        "measurements": {name: run.values(name) for name in names},
        "facts": dict(run.trials[-1].facts),
    }
    return masked_json.line(content)


def judgement_json(judgement: Judgement) -> str:
    """Return a judgement as one object of strict JSON."""
    past = judgement.past
    content = {"task": past.task, "hardware": past.hardware, "settings": past.settings}
    content |= {"measurement": judgement.measurement, "verdict": str(judgement.change), "text": judgement.text}
    return masked_json.line(content | {"newest": str(past.runs[-1].folder)})


def _values(past: Past, of: Measurement) -> list[float]:
    return [fmean(values) for run in past.runs if (values := run.values(of.name))]


def _title(of: Measurement) -> str:
    return f"{of.name} ({of.unit})" if of.unit else of.name


def _day(run: PastRun) -> str:
    return strftime("%Y-%m-%d", localtime(run.began_ms / 1000))


def _changes(before: PastRun, run: PastRun) -> str:
    """Return the software and hardware that is not what it was."""
    old, new = before.trials[-1].facts, run.trials[-1].facts
    names = [name for name in dict.fromkeys((*old, *new)) if name not in _NO_CHANGE and old.get(name) != new.get(name)]
    return "; ".join(f"{name} {_short(old.get(name))} → {_short(new.get(name))}" for name in names)


def _short(value: str | None) -> str:
    """Return a value of a fact; of a checksum, as much as is said aloud."""
    text = value or "not known"
    tail = "-dirty" if text.endswith("-dirty") else ""
    return f"{text[:10]}…{tail}" if len(text) > 24 and " " not in text else text
