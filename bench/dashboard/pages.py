"""The variables of the dashboard's pages."""

import re
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
from bench.dashboard.listing import Listed, Listing
from bench.dashboard.live import Live, Logs
from bench.errors import BenchError, ConfigError
from bench.history import compare, measured_trials, store
from bench.history.compare import RunSet
from bench.history.measured_trials import Runs
from bench.history.regression import TaskHistory
from bench.report import kinds, labels, trials_page
from bench.report.canvas import COLORS
from bench.report.curves import number
from bench.report.tables import TextTable
from bench.report.template import Chart, axis, chart, text, view
from bench.results.measurement import Measurement
from bench.runs.folder import short
from bench.studies.measured import as_in_study
from bench.texts import counted

MOST_LISTED, MOST_COMPARED, MOST_HISTORIES = 300, 8, 24
_MOST_PAGES = 8
_FOLDER_WORDS = re.compile(r"(?:^| )launch\.folder=.*?(?= [\w.@+~/]+=|$)")
"""The override that the run's name already shows; its path may contain spaces."""
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
        started=results.started,
        state=one.run.state_name,
        style=style(one),
        trials=", ".join(f"{count} {outcome}" for outcome, count in Counter(shown.outcomes).items()),
        speed=(_text(results.minutes, ".2f"), _text(results.step_time_ms, ",.1f"), _text(results.tokens_s, ",.0f")),
        tags=results.tags.tags,
        overrides=_FOLDER_WORDS.sub("", results.overrides).strip(),
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


def runs(listing: Listing) -> Context:
    every = listing.runs()
    return {
        "title": f"Runs in {short(listing.root)}",
        "rows": [row(one) for one in every[:MOST_LISTED]],
        "num_more": max(0, len(every) - MOST_LISTED),
        "most_compared": MOST_COMPARED,
        "num_active": sum(one.run.is_active for one in every),
        "left_out": listing.left_out,
        "charts": {},
    }


def run(one: Listed, followed: Live) -> Context:
    state = followed.state(one.folder)
    logs = replace(followed.logs(one.folder), is_open=not state["is_over"])
    return _charts([logs]) | {
        "title": one.name,
        "row": row(one),
        "folder": str(one.folder),
        "state": state,
        "is_active": not state["is_over"] or one.run.is_active,
        "too_large": logs.too_large,
        "has_logs": bool(logs.judged),
    }


def _charts(logs: Sequence[Logs]) -> Context:
    shown = live.charts(logs)
    return {
        "titles": {name: title for name, (title, _) in shown.items()},
        "charts": {name: chart for name, (_, chart) in shown.items()},
    }


def live_state(one: Listed, followed: Live) -> Context:
    """Return what the page of a run asks for while the run is under way."""
    state = followed.state(one.folder)
    logs = replace(followed.logs(one.folder), is_open=not state["is_over"])
    return state | _charts([logs]) | {"run_state": one.run.state_name, "style": style(one)}


def comparison(chosen: Sequence[Listed], followed: Live) -> Context:
    """Return the page of some runs side by side; of two, with the verdict of `compare`."""
    if not 2 <= len(chosen) <= MOST_COMPARED:
        are = "is" if len(chosen) == 1 else "are"
        what = f"{counted(len(chosen), 'run')} {are} chosen, but 2 to {MOST_COMPARED} can be compared"
        raise ConfigError(what, where="the list of runs", fix=f"tick 2 to {MOST_COMPARED} runs, then choose compare")
    names = labels.short([one.name for one in chosen])
    sets = [_run_set(one.folder) for one in chosen]
    logs = [replace(followed.logs(one.folder), name=one.name, is_open=one.run.is_active) for one in chosen]
    return (
        _verdict(sets)
        | _charts(logs)
        | {
            "title": f"{len(chosen)} runs compared",
            "chosen": list(zip(names, map(row, chosen), strict=True)),
            "measurements": _measurements(sets, names),
        }
    )


def _run_set(folder: Path) -> RunSet:
    """Return the valid trials of a run; none, with the reason, if its study cannot be read."""
    of_folder = RunSet(path=str(folder), runs=measured_trials.in_folder(folder))
    try:
        return as_in_study(of_folder)
    except BenchError as error:
        return replace(of_folder, runs=Runs(trials=(), left_out=(error.what,)))


def _verdict(sets: Sequence[RunSet]) -> Context:
    """Return the verdict on two runs with its tables, or why these are not compared; nothing for more runs."""
    nothing: Context = {"verdict": "", "tables": [], "why_not": "", "has_no_difference": False}
    if len(sets) != 2:
        return nothing
    try:
        compared = compare.compared(*sets)
    except BenchError as error:
        return nothing | {"why_not": error.what}
    title = comparison_tables.measure(compared.comparison).replace("_", " ")
    tables = [trials_page.grid(TextTable("", comparison_tables.value_rows(compared))) | {"title": title}]
    if compared.differences:
        table = comparison_tables.differences(compared)
        columns = ("setting", *table.columns[1:])
        tables.append(trials_page.grid(replace(table, title="what differs", columns=columns)))
    has_no_difference = not compared.differences
    return nothing | {"verdict": compared.comparison.text, "tables": tables, "has_no_difference": has_no_difference}


def _measurements(sets: Sequence[RunSet], names: Sequence[str]) -> Context:
    """Return each measurement of the valid trials, a column for each run: means over trials."""
    values: dict[tuple[str, str], dict[int, list[float]]] = {}
    for place, run_set in enumerate(sets):
        for trial in run_set.trials:
            for name, measured in trial.measurements.items():
                values.setdefault((name, measured.unit), {}).setdefault(place, []).append(measured.value)
    rows = []
    for (name, unit), of_runs in values.items():
        means = {place: fmean(of_run) for place, of_run in of_runs.items()}
        like = [*means.values()]
        cells = [
            comparison_tables.number(means[place], like=like) if place in means else "" for place in range(len(sets))
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


def history(listing: Listing, task: str | None) -> Context:
    """Return the page of past results: a chart for each task on the same hardware with the same settings."""
    every = listing.histories()
    tasks = sorted({one.task for one in every})
    chosen = [one for one in every if task in (None, one.task)]
    parts: list[tuple[str, TaskHistory, Measurement | None]] = []
    for one in chosen[:MOST_HISTORIES]:
        for measurement in history_tables.shown_measurements(one, None)[:2]:
            parts.append((f"history_{len(parts)}", one, measurement))
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
                live.keep(self._pages, folders, (stamp, page.read_text(encoding="utf-8")), most=_MOST_PAGES)
            return self._pages[folders][1]
