"""The variables of the dashboard's pages."""

import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.console import comparison as comparison_tables
from bench.console import history as history_tables
from bench.console import runs as run_tables
from bench.dashboard import live
from bench.dashboard.live import Live
from bench.dashboard.shelf import Listed, Shelf
from bench.errors import BenchError, ConfigError
from bench.history import compare, measured_trials, store
from bench.history.regression import TaskHistory
from bench.report import kinds, labels, trials_page
from bench.report.canvas import COLORS
from bench.report.curves import number
from bench.report.template import Chart, axis, chart, text, view
from bench.results.measurement import Measurement
from bench.runs.folder import short
from bench.studies.measured import run_set

MOST_LISTED, MOST_COMPARED, MOST_HISTORIES = 300, 8, 24
_MOST_PAGES = 8
Context = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the list of runs."""

    id: str
    name: str
    started: str
    state: str
    style: str
    trials: str
    speed: tuple[str, str, str]
    tags: tuple[str, ...]
    overrides: str
    note: str


def row(one: Listed) -> Row:
    results = one.summary
    shown = run_tables.answer(one.run, results)
    return Row(
        id=one.id,
        name=one.name,
        started=one.summary.started,
        state=one.run.state_name,
        style=style(one),
        trials=", ".join(f"{count} {outcome}" for outcome, count in Counter(shown.outcomes).items()),
        speed=(_text(results.minutes, ".2f"), _text(results.step_time_ms, ",.1f"), _text(results.tokens_s, ",.0f")),
        tags=results.tags.tags,
        overrides=results.overrides,
        note="; ".join(filter(None, (shown.reason, one.other_writers, results.tags.note))),
    )


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def style(one: Listed) -> str:
    """Return how the state of a run is shown: active, good, bad, or neither."""
    if one.run.is_active:
        return "active"
    if one.run.status is None:
        return "bad" if one.run.has_died else ""
    return "bad" if one.run.status.exit_code else "good"


def runs(shelf: Shelf) -> Context:
    every = shelf.runs()
    return {
        "title": f"Runs in {short(shelf.root)}",
        "rows": [row(one) for one in every[:MOST_LISTED]],
        "num_more": max(0, len(every) - MOST_LISTED),
        "num_active": sum(one.run.is_active for one in every),
        "left_out": shelf.left_out,
        "charts": {},
    }


def run(one: Listed, followed: Live) -> Context:
    state = followed.state(one.folder)
    logs = replace(followed.logs(one.folder), is_open=not state["is_over"])
    shown = live.charts([logs])
    return {
        "title": one.name,
        "row": row(one),
        "folder": str(one.folder),
        "state": state,
        "is_active": not state["is_over"] or one.run.is_active,
        "too_large": logs.too_large,
        "has_logs": bool(logs.judged),
        "titles": {name: title for name, (title, _) in shown.items()},
        "charts": {name: chart for name, (_, chart) in shown.items()},
    }


def live_state(one: Listed, followed: Live) -> Context:
    """Return what the page of a run asks for while the run is under way."""
    state = followed.state(one.folder)
    shown = live.charts([replace(followed.logs(one.folder), is_open=not state["is_over"])])
    return state | {
        "id": one.id,
        "run_state": one.run.state_name,
        "style": style(one),
        "titles": {name: title for name, (title, _) in shown.items()},
        "charts": {name: chart for name, (_, chart) in shown.items()},
    }


def comparison(chosen: Sequence[Listed], followed: Live) -> Context:
    """Return the page of some runs side by side; of two, with the verdict of `compare`."""
    if not 2 <= len(chosen) <= MOST_COMPARED:
        what = f"{len(chosen)} runs are chosen, but 2 to {MOST_COMPARED} can be compared"
        raise ConfigError(what, where="the list of runs", fix="tick 2 or more runs, then choose compare")
    tables, verdict, why_not = [], "", ""
    names = labels.short([one.name for one in chosen])
    if len(chosen) == 2:
        try:
            compared = compare.compared(*(run_set(str(one.folder)) for one in chosen))
            values, differences = map(trials_page.grid, comparison_tables.sheets(compared))
            verdict, values["rows"] = compared.comparison.text, values["rows"][1:]  # the first row is the verdict
            verdict_of = compared.comparison
            unit, best = (
                f" ({verdict_of.unit})" if verdict_of.unit else "",
                "higher" if verdict_of.higher_is_better else "lower",
            )
            tables = [values | {"title": f"{verdict_of.measurement.replace('_', ' ')}{unit}, {best} is better"}]
            if compared.differences:
                columns = ("setting", *differences["columns"][1:])
                tables.append(differences | {"title": "What differs", "columns": columns})
        except BenchError as error:
            why_not = error.what
    logs = [replace(followed.logs(one.folder), name=one.name, is_open=one.run.is_active) for one in chosen]
    shown = live.charts(logs)
    return {
        "title": f"{len(chosen)} runs compared",
        "chosen": list(zip(names, map(row, chosen), strict=True)),
        "has_no_difference": bool(verdict) and len(tables) == 1,
        "verdict": verdict,
        "tables": tables,
        "why_not": why_not,
        "measurements": _measurements(chosen, names),
        "titles": {name: title for name, (title, _) in shown.items()},
        "charts": {name: chart for name, (_, chart) in shown.items()},
    }


def _measurements(chosen: Sequence[Listed], names: Sequence[str]) -> Context:
    """Return each measurement of the valid trials, a column for each run: means over trials."""
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for one in chosen:
        for trial in measured_trials.in_folder(one.folder).trials:
            for name, measured in trial.measurements.items():
                values.setdefault((name, measured.unit), {}).setdefault(one.id, []).append(measured.value)
    rows = []
    for (name, unit), of_runs in values.items():
        like = [fmean(of_run) for of_run in of_runs.values()]
        cells = [
            comparison_tables.number(fmean(of_runs[one.id]), like=like) if one.id in of_runs else "" for one in chosen
        ]
        rows.append((name.replace("_", " "), unit, *cells))
    columns = ("measurement", "unit", *names)
    numeric = set(range(2, len(columns)))
    caption = "Means over the valid trials of each run; blank if not measured."
    return {
        "title": "Measurements",
        "columns": columns,
        "rows": rows,
        "numeric": numeric,
        "fixed": {1},
        "caption": caption,
    }


def history(shelf: Shelf, task: str | None) -> Context:
    """Return the page of past results: a chart for each task on the same hardware with the same settings."""
    every = shelf.histories()
    tasks = sorted({one.task for one in every})
    chosen = [one for one in every if task in (None, one.task)]
    parts: list[tuple[str, TaskHistory, Measurement | None]] = []
    for place, one in enumerate(chosen[:MOST_HISTORIES]):
        for measurement in history_tables.shown_measurements(one, None)[:2]:
            name = f"history_{place}_{len(parts)}"
            parts.append((name, one, measurement))
    sections = [
        {"name": name, "table": trials_page.grid(history_tables.runs_sheet(one, measured))}
        for name, one, measured in parts
    ]
    return {
        "title": f"History of {task}" if task else "History",
        "tasks": tasks,
        "task": task,
        "sections": sections,
        "num_more": max(0, len(chosen) - MOST_HISTORIES),
        "charts": {
            name: _over_time(one, measured) for name, one, measured in parts if measured is not None and one.runs[1:]
        },
    }


def _over_time(one: TaskHistory, measurement: Measurement) -> Chart:
    """Return the mean of each run over the date; a line connects them."""
    points = [(run, values) for run in one.runs if (values := run.values(measurement.name))]
    name = text(f"{measurement.name.replace('_', ' ')} ({measurement.unit})")
    dates = [datetime.fromtimestamp(run.began_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S") for run, _ in points]
    trace = {
        "mode": "lines+markers",
        "x": dates,
        "y": [number(fmean(values)) for _, values in points],
        "line": {"color": COLORS[0], "width": 1.6},
        "marker": {"color": COLORS[0], "size": 7},
        "customdata": [text(run.folder.name) for run, _ in points],
        "hovertemplate": "%{customdata}<br><b>%{y:,.5g}</b><extra></extra>",
        "showlegend": False,
    }
    times = axis("began (UTC)", type="date")
    return chart(view("", [trace], xaxis=times, yaxis=axis(name), height=280))


@dataclass(slots=True)
class Reports:
    """The pages of `runstop report`, written into a temporary folder and kept until a log changes."""

    _pages: dict[tuple[Path, ...], tuple[str, str]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def page(self, chosen: Sequence[Listed]) -> str:
        """Return the page of some runs.

        Raises:
            BenchError: a log cannot be read, or the runs are of different kinds.
        """
        folders = tuple(one.folder for one in chosen)
        stamp = "\n".join(map(store.stamp, folders))
        with self._lock, tempfile.TemporaryDirectory(prefix="runstop-") as scratch:
            if self._pages.get(folders, ("",))[0] != stamp:
                page = kinds.load(folders).write(Path(scratch, "report"), title=None)
                self._pages.pop(folders, None)
                while len(self._pages) >= _MOST_PAGES:
                    self._pages.pop(next(iter(self._pages)))
                self._pages[folders] = stamp, page.read_text(encoding="utf-8")
            return self._pages[folders][1]
