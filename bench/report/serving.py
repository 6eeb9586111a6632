"""What serving tasks measured as files to hand on: a page, every load and request as CSV, and the figures."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.errors import ConfigError
from bench.mlperf import log as logs
from bench.mlperf import result as results
from bench.mlperf.result import Result
from bench.report import drawings, interactive, output_folder, serving_figures, serving_rows, template
from bench.report.data_frames import inert
from bench.report.serving_figures import Named
from bench.results import serving as serving_results
from bench.results.serving import ServingResult

PAGE, TABLE, TEMPLATE = "report.html", "requests.csv", "serving.html.j2"
_FILES = re.compile(rf"report\.html|requests\.csv|({'|'.join(serving_figures.NAMES)})\.png")
"""Names of what such a report consists of."""
_COLUMNS = ("trial", "server", "load", "request", "arrival_s", "latency_s", "ttft_s", "tpot_s", "tokens_out", "status")


@dataclass(frozen=True, slots=True)
class ServingTrial:
    """The log of one trial of a serving task, read."""

    name: str
    result: Result
    serving: ServingResult

    @property
    def is_proven(self) -> bool:
        return self.result.valid and self.serving.proven


def load(paths: Sequence[Path]) -> list[ServingTrial]:
    """Return the trials of run folders and logs of serving tasks, in their order; none if they are of other kinds.

    Raises:
        ConfigError: some are of one kind, and some of another.
        LogError: a log cannot be read.
    """
    found, others = [], []
    for path in paths:
        for file in sorted(path.glob("result_*.txt")) if path.is_dir() else [path]:
            serving = serving_results.read(logs.read(file)) if file.is_file() else None
            if serving is None:
                others.append(str(path))
            else:
                name = f"{file.parent.name}/{file.stem}" if path.is_dir() else str(file)
                found.append(ServingTrial(name, results.parse(file), serving))
    if found and others:
        raise ConfigError(
            "runs that load a server, and runs that do not, are not shown on one page",
            where=", ".join(dict.fromkeys(others)),
            fix="report them apart",
        )
    return found


def write(trials: Sequence[ServingTrial], out: Path, *, heading: str) -> Path:
    """Write the page, the table of every request and the figures into a folder; return the page's path.

    Raises:
        ConfigError: the folder cannot be made or written, or holds files of these names that are not ours.
    """
    output_folder.write(out, lambda part: _write(trials, part, heading=heading), page=PAGE, names=_FILES)
    return out / PAGE


def _write(trials: Sequence[ServingTrial], out: Path, *, heading: str) -> None:
    (out / TABLE).write_text(csv_text(trials), encoding="utf-8")
    places = ", ".join(dict.fromkeys(trial.result.platform or "platform not logged" for trial in trials))
    random = " Random weights: times mean something, answers do not." * any(t.serving.is_random for t in trials)
    note = f"{places}, n = {len(trials)} run{'s' if len(trials) > 1 else ''}.{random}"
    named = [Named(_name(trial, trials), trial.serving) for trial in trials]
    files = serving_figures.draw(named, out, heading=heading, note=note)
    context = {
        "title": heading,
        "sections": [_section(trial) for trial in trials],
        "columns": serving_rows.COLUMNS,
        "figures": [drawings.shown(file, CAPTIONS[file.stem]) for file in files],
        "charts": {},
        "versions": {"runstop": version("runstop")},
    }
    (out / PAGE).write_text(template.page(TEMPLATE, context | interactive.context(has_charts=False)), encoding="utf-8")


CAPTIONS = {
    "latency_cdf": "The share of all requests that were answered within so many seconds:",
    "output_throughput": "Output of each load:",
    "rate_sweep": "Latency and answered requests over the rate of arrival; dotted: every request answered:",
}


def _name(trial: ServingTrial, trials: Sequence[ServingTrial]) -> str:
    """Return what a figure calls a trial: its server and model where that tells it from the others."""
    name = f"{trial.serving.server} {Path(trial.serving.model).name}"
    others = [f"{one.serving.server} {Path(one.serving.model).name}" for one in trials if one is not trial]
    return f"{name} ({trial.name})" if name in others else name


def _section(trial: ServingTrial) -> dict[str, Any]:
    """Return what the page says of a trial."""
    serving = trial.serving
    memory = f"{serving.memory_gib:.1f} GiB" if serving.memory_gib is not None else f"- ({serving.no_memory})"
    verdict = "every load was measured, and answered as asked for" if trial.is_proven else "not proven"
    errors = [finding.titled for finding in trial.result.findings if finding.severity == "error"]
    return {
        "name": f"{trial.name}: {serving.server}, {serving.model}",
        "lead": f"{serving.about}; GPU memory at its peak {memory}: {verdict}.",
        "problems": [*errors, *serving.problems],
        "rows": [serving_rows.row(one) for one in serving.loads],
        "notes": serving_rows.notes(serving),
    }


def csv_text(trials: Sequence[ServingTrial]) -> str:
    """Return every request of every trial as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for trial in trials:
        writer.writerows([inert(value) for value in row] for row in _rows(trial))
    return text.getvalue()


def _rows(trial: ServingTrial) -> Iterator[Sequence[object]]:
    for one in trial.serving.loads:
        columns = (one.arrival_s, one.latency_s, one.ttft_s, one.tpot_s, one.tokens_out, one.status)
        for number, values in enumerate(zip(*columns, strict=True)):
            at, took, *tokens, count, status = values
            times = ["", ""] if one.no_token_times else tokens
            yield [trial.name, trial.serving.server, one.load.name, number, at, took, *times, count, status]
