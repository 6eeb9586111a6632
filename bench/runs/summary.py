"""Summarize a run folder: its overrides, when it started, and how fast it was."""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.contract.plan import Plan
from bench.errors import BenchError
from bench.mlperf import result as results
from bench.mlperf.result import Result
from bench.runs import command_line, names, tags
from bench.runs.folder import plan_in
from bench.runs.tags import Tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Numbers are medians over its valid trials; None if no valid trial has the number."""

    folder: Path
    started: str
    """When its first valid trial began, as in `runstop history`, else its first trial; before that, when it was
    launched. Such as 2026-11-22 07:53, in local time; empty for a folder without a plan."""
    started_s: float | None = None
    """The same, in seconds since the epoch."""
    overrides: str
    """The overrides on its command line; empty if they are not known."""
    tags: Tags = Tags()
    num_valid: int
    minutes: float | None
    step_time_ms: float | None
    tokens_s: float | None
    """Of all ranks together, while training."""


def summary(folder: Path) -> Summary:
    """Return the summary of a run folder; files may be missing."""
    plan = plan_in(folder)
    parsed = _results(folder, plan)
    valid = [result for result in parsed if result.valid]
    began_ms = [result.run_start_ms for result in valid or parsed if result.run_start_ms is not None]
    started_s = min(began_ms) / 1000 if began_ms else names.launched_s(folder)
    tokens = plan.config.data.seq_length if plan and plan.config.data else None
    return Summary(
        folder=folder,
        started=_local(started_s) if started_s else "",
        started_s=started_s or None,
        overrides=command_line.text(folder),
        tags=tags.read(folder),
        num_valid=len(valid),
        minutes=_median(result.minutes for result in valid),
        step_time_ms=_median(result.step_time_ms.median for result in valid if result.step_time_ms),
        tokens_s=_median(r.throughput_samples_s * tokens for r in valid if r.throughput_samples_s and tokens),
    )


def _local(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):  # a log may state any time
        return ""


def _results(folder: Path, plan: Plan | None) -> list[Result]:
    logs = [folder / trial.log for trial in plan.trials] if plan else sorted(folder.glob("result_*.txt"))
    parsed = []
    for log in logs:
        with suppress(BenchError):
            parsed.append(results.parse(log))
    return parsed


def _median(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return median(known) if known else None
