"""What serving tasks measured as files to hand on: a page, every load and request as CSV, and the figures."""

import csv
import io
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.report import drawings, interactive, output_folder, serving_figures, serving_rows, template
from bench.report.data_frames import inert
from bench.report.serving_figures import Named
from bench.report.trials import ReadTrial
from bench.results.serving import ServingResult

PAGE, TABLE, TEMPLATE = "report.html", "requests.csv", "serving.html.j2"
_FILES = re.compile(rf"report\.html|requests\.csv|({'|'.join(serving_figures.NAMES)})\.png")
"""Names of what such a report consists of."""
_COLUMNS = ("trial", "server", "load", "request", "arrival_s", "latency_s", "ttft_s", "tpot_s", "tokens_out", "status")


def write(trials: Sequence[ReadTrial[ServingResult]], out: Path, *, heading: str) -> Path:
    """Write the page, the table of every request and the figures into a folder; return the page's path.

    Raises:
        ConfigError: the folder cannot be made or written, or holds files of these names that are not ours.
    """
    output_folder.write(out, lambda part: _write(trials, part, heading=heading), page=PAGE, names=_FILES)
    return out / PAGE


def _write(trials: Sequence[ReadTrial[ServingResult]], out: Path, *, heading: str) -> None:
    (out / TABLE).write_text(csv_text(trials), encoding="utf-8")
    places = ", ".join(dict.fromkeys(trial.result.platform or "platform not logged" for trial in trials))
    random = " Random weights: times mean something, answers do not." * any(t.found.is_random for t in trials)
    note = f"{places}, n = {len(trials)} run{'s' if len(trials) > 1 else ''}.{random}"
    named = [Named(_name(trial, trials), trial.found) for trial in trials]
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


def _name(trial: ReadTrial[ServingResult], trials: Sequence[ReadTrial[ServingResult]]) -> str:
    """Return what a figure calls a trial: its server and model where that tells it from the others."""
    name = f"{trial.found.server} {Path(trial.found.model).name}"
    others = [f"{one.found.server} {Path(one.found.model).name}" for one in trials if one is not trial]
    return f"{name} ({trial.name})" if name in others else name


def _section(trial: ReadTrial[ServingResult]) -> dict[str, Any]:
    """Return what the page says of a trial."""
    serving = trial.found
    memory = f"{serving.memory_gib:.1f} GiB" if serving.memory_gib is not None else f"- ({serving.no_memory})"
    verdict = "every load was measured, and answered as asked for" if trial.is_proven else "not proven"
    errors = [finding.titled for finding in trial.result.findings if finding.severity == "error"]
    return {
        "name": f"{trial.name}: {serving.server}, {serving.model}",
        "lead": f"{serving.about}; GPU memory at its peak {memory}{_knee(serving)}: {verdict}.",
        "problems": [*errors, *serving.problems],
        "rows": [serving_rows.row(one) for one in serving.loads],
        "notes": serving_rows.notes(serving),
    }


def _knee(serving: ServingResult) -> str:
    if not serving.swept:
        return ""
    return f"; knee - ({serving.no_knee})" if serving.knee is None else f"; knee {serving.knee:g} requests/s"


def csv_text(trials: Sequence[ReadTrial[ServingResult]]) -> str:
    """Return every request of every trial as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for trial in trials:
        writer.writerows([inert(value) for value in row] for row in _rows(trial))
    return text.getvalue()


def _rows(trial: ReadTrial[ServingResult]) -> Iterator[Sequence[object]]:
    for one in trial.found.loads:
        columns = (one.arrival_s, one.latency_s, one.ttft_s, one.tpot_s, one.tokens_out, one.status)
        for number, values in enumerate(zip(*columns, strict=True)):
            at, took, *tokens, count, status = values
            times = ["", ""] if one.no_token_times else tokens
            yield [trial.name, trial.found.server, one.load.name, number, at, took, *times, count, status]
