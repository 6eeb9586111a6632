"""Write results as one self-contained HTML page, CSV tables and PNG figures."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bench.report import output_folder
from bench.results.cost import NAMES as COSTS
from bench.results.measurement import Measurement
from bench.results.training import TrainingResult
from bench.rules.finding import Finding

if TYPE_CHECKING:  # imported when a page is written: every launch imports table texts from this folder
    from pandas import DataFrame

    from bench.mlperf.result import Result
    from bench.report.page import Row
    from bench.report.sets import TrialSet
    from bench.results.study import StudyResult

__all__ = ["csv", "frames", "trial_rows", "write", "write_study"]
PAGE, TEMPLATE = "report.html", "report.html.j2"
_FILES = re.compile(
    r"report\.html|(trials|evaluations|step_times|measurements)\.csv"
    r"|(sets|(convergence|step_time|modules|samples|published)(_\d+)?)\.png"
)
"""Names of the files of a report."""


def write(sets: "Sequence[TrialSet]", out: Path, *, title: str | None = None) -> Path:
    """Write the page, the tables and the figures into a folder and return the page's path; same input, same bytes.

    Raises:
        ConfigError: the folder cannot be created or written, or has files of these names that runstop did not write.
    """
    output_folder.write(out, lambda part: _write(sets, part, title=title), page=PAGE, names=_FILES)
    return out / PAGE


def _write(sets: "Sequence[TrialSet]", out: Path, *, title: str | None) -> None:
    from bench.report import page

    for name, table in frames(sets).items():
        table.to_csv(out / f"{name}.csv", index=False, lineterminator="\n")
    context = page.context(sets, [_rows(trials) for trials in sets], out, title=title)
    (out / PAGE).write_text(_render(context), encoding="utf-8")


def _render(context: Mapping[str, Any]) -> str:
    from bench.report import template

    return template.page(TEMPLATE, context)


def write_study(result: "StudyResult", out: Path) -> list[Path]:
    """Write a study's tables, page and figures into a folder and return their paths; same input, same bytes.

    Links to the runs of a study are relative, so that its folder and `out` may be moved together.

    Raises:
        ConfigError: the folder cannot be created or written, or has files of these names that runstop did not write.
    """
    from bench.report import study

    return study.write_study(result, out)


def trial_rows(sets: "Sequence[TrialSet]") -> "list[Row]":
    """Return one row per trial of all sets; a number that the log does not have is None.

    Only rows of logs with a price have costs; if one has, every row has their columns.
    """
    rows = [row for trials in sets for row in _rows(trials)]
    names = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in names} for row in rows]


def csv(sets: "Sequence[TrialSet]") -> str:
    """Return the table of trials as CSV."""
    return str(frames(sets)["trials"].to_csv(index=False, lineterminator="\n"))


def _rows(trials: "TrialSet") -> "list[Row]":
    s = trials.score
    return [
        {
            "set": trials.name,
            "trial": name,
            "file": r.file,
            "benchmark": r.benchmark,
            "hardware": trials.hardware,
            "run_start": _date(r.run_start_ms),
            "seed": r.seed,
            "minutes": r.minutes,
            "samples_to_target": r.samples_to_target,
            "eval_final": None if r.has_random_rows else r.eval_final,
            "target": r.target,
            "step_time_ms": r.step_time_ms.median if r.step_time_ms else None,
            "step_time_p10_ms": r.step_time_ms.p10 if r.step_time_ms else None,
            "step_time_p90_ms": r.step_time_ms.p90 if r.step_time_ms else None,
            "throughput_samples_s": r.throughput_samples_s,
            "tokens_s_gpu": r.tokens_s_gpu if trials.num_gpus else None,
            "real_tokens_s_gpu": r.real_tokens_s_gpu if trials.num_gpus else None,
            "steps_time_s": r.steps_time_s,
            "epoch_time_s": fmean(r.epoch_times_s) if r.epoch_times_s else None,
            "train_loss": r.train_loss,
            "tflops_gpu": r.tflops_gpu if trials.num_gpus else None,
            "mfu": r.mfu if trials.num_gpus else None,
            "eval_time_s": r.eval_time_s,
            "evaluation_share": r.evaluation_share,
            "peak_memory_gib": r.peak_memory_gib.allocated if r.peak_memory_gib else None,
            "estimated_memory_gib": r.peak_memory_gib.estimated if r.peak_memory_gib else None,
            "has_target": r.has_target,
            "valid": r.valid,
            "official": official.passed,
            "counted": _counted(trials, r.file),
            "why": "; ".join(_finding_text(f) for f in r.findings if f.severity == "error"),
            **_costs(r),
        }
        for name, r, official in zip(trials.trial_names, s.results, s.compliance, strict=True)
    ]


def frames(sets: "Sequence[TrialSet]") -> "dict[str, DataFrame]":
    """Return the tables as data frames: one row per trial, per evaluation, per measured step time, per measurement."""
    from bench.report.tables import frame

    rows = trial_rows(sets)
    runs = [(t.name, name, r) for t in sets for name, r in zip(t.trial_names, t.results, strict=True)]
    evaluations = [
        (s, name, e.samples, _date(e.time_ms), e.metric, e.value, e.line) for s, name, r in runs for e in r.evaluations
    ]
    step_times = [(s, name, *measured) for s, name, r in runs for measured in r.step_times_ms]
    measurements = [
        (s, name, *astuple(measurement)) for s, name, r in runs for measurement in TrainingResult(result=r).measurements
    ]
    return {
        "trials": frame([tuple(row.values()) for row in rows], list(rows[0])),
        "evaluations": frame(evaluations, ["set", "trial", "samples", "time", "metric", "value", "line"]),
        "step_times": frame(step_times, ["set", "trial", "samples", "step_time_ms"]),
        "measurements": frame(measurements, ["set", "trial", *(field.name for field in fields(Measurement))]),
    }


def _costs(result: "Result") -> "Row":
    """Return the costs of a trial, and their currency; empty if its log has no price."""
    paid = [one for one in TrainingResult(result=result).measurements if one.name in COSTS]
    return {**{one.name: one.value for one in paid}, "currency": paid[0].unit} if paid else {}


def _date(time_ms: int | None) -> str | None:
    """Return a time of the log as UTC; None for one outside the range of datetime."""
    try:
        return None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def _counted(trials: "TrialSet", file: str) -> str:
    """Return whether a trial is counted in the olympic mean or dropped; empty without a mean."""
    s, name = trials.score, Path(file).name
    if s.olympic_minutes is None:
        return ""
    dropped = {"fastest": s.dropped_fastest, "slowest": s.dropped_slowest}
    return next((f"dropped: {end}" for end, names in dropped.items() if name in (names or "").split(", ")), "counted")


def _finding_text(finding: Finding) -> str:
    return f"{finding.rule}{f' line {finding.line}' if finding.line else ''}: {finding.what}"
