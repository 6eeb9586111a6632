"""What generation tasks measured as files to hand on: a page, every answer as CSV, and the figure of their times."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import astuple, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.report import drawings, generation_rows, interactive, output_folder, template
from bench.report.canvas import canvas, save
from bench.report.data_frames import inert
from bench.report.trials import ReadTrial
from bench.results.generation import Answered, GenerationResult

PAGE, TABLE, TEMPLATE, FIGURE = "report.html", "answers.csv", "generation.html.j2", "answers.png"
_FILES = re.compile(r"report\.html|answers\.(csv|png)")
"""Names of what such a report consists of."""
_HEIGHT_INCHES = 4.2


def write(trials: Sequence[ReadTrial[GenerationResult]], out: Path, *, heading: str) -> Path:
    """Write the page, the table of every answer and the figure into a folder; return the page's path.

    Raises:
        ConfigError: the folder cannot be made or written, or holds files of these names that are not ours.
    """
    output_folder.write(out, lambda part: _write(trials, part, heading=heading), page=PAGE, names=_FILES)
    return out / PAGE


def _write(trials: Sequence[ReadTrial[GenerationResult]], out: Path, *, heading: str) -> None:
    (out / TABLE).write_text(csv_text(trials), encoding="utf-8")
    drawn = [trial for trial in trials if trial.is_proven]
    if drawn:
        figure(drawn, out / FIGURE, heading=heading)
    shown = [drawings.shown(out / FIGURE, "")] if drawn else []
    context = {
        "title": heading,
        "sections": [_section(trial) for trial in trials],
        "figures": shown,
        "charts": {},
        "versions": {"runstop": version("runstop")},
    }
    (out / PAGE).write_text(template.page(TEMPLATE, context | interactive.context(has_charts=False)), encoding="utf-8")


def _section(trial: ReadTrial[GenerationResult]) -> dict[str, Any]:
    """Return what the page says of a trial."""
    rows = [generation_rows.length_row(one) for one in generation_rows.lengths(trial.found)]
    return {
        "name": trial.name,
        "rows": generation_rows.verdict_rows(trial.result, trial.found),
        "columns": generation_rows.LENGTH_COLUMNS,
        "lengths": rows,
        "caption": generation_rows.caption(trial.found),
    }


def figure(trials: Sequence[ReadTrial[GenerationResult]], path: Path, *, heading: str) -> None:
    """Draw the time of every answer over its length, one colour for each trial."""
    note = f"{trials[0].result.platform or 'platform not logged'}; one mark for each answer"
    drawing, (axes,) = canvas(_HEIGHT_INCHES, heading, note, panels=1)
    for trial in trials:
        answers = trial.found.answers
        axes.plot([one.tokens for one in answers], [one.done_s for one in answers], "o", ms=4, label=trial.name)
    axes.set_xlabel("length of the answer (tokens)")
    axes.set_ylabel("time of the answer (s)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    save(drawing, path)


def csv_text(trials: Sequence[ReadTrial[GenerationResult]]) -> str:
    """Return every answer of every trial as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", *(field.name for field in fields(Answered))])
    writer.writerows(
        [inert(value) for value in (trial.name, *astuple(one))] for trial in trials for one in trial.found.answers
    )
    return text.getvalue()
