"""The state and the curves of a run, also while it is under way."""

import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bench.contract.run_files import PREPARE_LOG, RESULTS
from bench.contract.task import Kind
from bench.errors import BenchError
from bench.mlperf.result import Result
from bench.report import curves, kinds
from bench.report.kinds import ShownTrial, TrialsKindReport
from bench.report.template import Charts
from bench.results import kind as results
from bench.results.kind import Judged
from bench.watch import lines, sources
from bench.watch.sources import WatchedTrials

MAX_LOG_BYTES = 64 << 20
"""Larger logs have no curves here, since they are read again when they grow; `runstop report` draws them."""
MOST_WATCHED = 32
"""Of how many runs the logs are followed at once; the others are read from their start again."""
K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Logs:
    """The trials of one run, as far as their logs can be read."""

    name: str
    judged: tuple[tuple[str, Judged], ...]
    too_large: int = 0
    is_open: bool = False
    """Whether the run is under way, so that a log without run_stop is not an invalid one."""

    @property
    def trial_names(self) -> Sequence[str]:
        return [name for name, _ in self.judged]

    @property
    def results(self) -> Sequence[Result]:
        results = [judged.result for _, judged in self.judged]
        return [replace(one, valid=True) if self.is_open and one.run_stop_ms is None else one for one in results]


def charts(runs: Sequence[Logs]) -> Charts:
    """Return the charts of one run, or of several runs of the same kind on the same axes; none for other runs."""
    named = [(logs.name, name, judged) for logs in runs for name, judged in logs.judged]
    of_kinds = {judged.kind for *_, judged in named}
    if of_kinds == {Kind.train}:
        overlaid = curves.overlaid([logs for logs in runs if logs.judged])
        return {name: (curves.TITLES[name], chart) for name, chart in overlaid.items()}
    if len(of_kinds) != 1:
        return {}
    report = kinds.report_of(of_kinds.pop())
    if not isinstance(report, TrialsKindReport):
        return {}
    several = len(runs) > 1
    trials: list[ShownTrial[Any]] = [ShownTrial(f"{run}, {name}" if several else name, j) for run, name, j in named]
    return report.charts([trial for trial in trials if trial.judged.result.run_start_ms is not None])


@dataclass(slots=True)
class Live:
    """Follows the logs of runs; each request reads only what is new."""

    _watched: dict[Path, WatchedTrials] = field(default_factory=dict)
    _logs: dict[Path, tuple[str, Logs]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def logs(self, folder: Path) -> Logs:
        """Return the trials of a run; logs that have not changed are not read again."""
        with self._lock:
            files = [*sorted(folder.glob(RESULTS))] or [folder / PREPARE_LOG]
            states = [(file, state) for file in files if (state := _state(file)) is not None]
            stamp = "; ".join(f"{file.name} {state.st_size} {state.st_mtime_ns}" for file, state in states)
            if self._logs.get(folder, ("",))[0] != stamp or not stamp:
                small = [file for file, state in states if state.st_size <= MAX_LOG_BYTES]
                logs = Logs(name=folder.name, judged=tuple(_read(small)), too_large=len(states) - len(small))
                keep(self._logs, folder, (stamp, logs), most=MOST_WATCHED)
            return self._logs[folder][1]

    def state(self, folder: Path) -> dict[str, Any]:
        """Return what `watch` shows of a run: a line for each trial with its facts, and whether the run has ended."""
        with self._lock:
            try:
                if folder not in self._watched:
                    started = sources.run_folder(folder, tracks=False)
                    for left in keep(self._watched, folder, started, most=MOST_WATCHED):
                        left.close_logs()
                watched = self._watched[folder]
                ends = watched.is_over()  # before reading, so that the last lines are not missed
                watched.poll()
                views = watched.views()
            except BenchError as error:
                return {"is_over": True, "why": error.what, "trials": []}
            trials = [
                {
                    "name": view.name,
                    "state": view.state,
                    "facts": [[name, _parted(value)] for name, value in lines.facts(view)],
                    "warnings": list(view.outlook.warnings),
                }
                for view in views
            ]
            return {"is_over": ends or watched.has_stopped(), "why": "", "trials": trials}


def _parted(value: str) -> str:
    """Return a value with dots between its parts; a page shows the two spaces of a terminal as one."""
    return value.replace("  ", " · ")


def keep(kept: dict[K, T], key: K, value: T, *, most: int) -> list[T]:
    """Add a value, and return the oldest ones that are no longer kept."""
    kept.pop(key, None)
    left = [kept.pop(next(iter(kept))) for _ in range(len(kept) - most + 1)]
    kept[key] = value
    return left


def _state(file: Path) -> os.stat_result | None:
    with suppress(OSError):
        state = file.lstat()
        return state if stat.S_ISREG(state.st_mode) else None
    return None


def _read(files: Sequence[Path]) -> Iterator[tuple[str, Judged]]:
    for file in files:
        with suppress(BenchError):
            name = file.stem.removeprefix("result_") if file.name != PREPARE_LOG else "prepare"
            yield name, results.read(file)
