"""What a run folder says of its run in one line: what was asked for, when, and how fast it was."""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.contract.plan import Plan
from bench.contract.run_files import CONFIG, PLAN
from bench.errors import BenchError
from bench.mlperf import result as results
from bench.mlperf.result import Result
from bench.runs.folder import plan_in
from bench.texts import steering

_OVERRIDES = "# overrides: "
"""Begins the first line of a config.yaml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run. Numbers are medians of its valid trials; None for what no valid trial proves."""

    folder: Path
    started: str
    """As 2026-11-22 07:53, in this machine's time; empty for a folder without a plan."""
    overrides: str
    """Of the command line that started it; empty where that is not known."""
    num_valid: int
    minutes: float | None
    step_time_ms: float | None
    tokens_s: float | None
    """Of all ranks together, while training."""


def summary(folder: Path) -> Summary:
    """Return what a run folder says; a folder that lacks some of it has a summary, too."""
    plan, made = plan_in(folder), folder / PLAN
    valid = [result for result in _results(folder, plan) if result.valid]
    tokens = plan.config.training_data.seq_length if plan else None
    return Summary(
        folder=folder,
        started=time.strftime("%Y-%m-%d %H:%M", time.localtime(made.stat().st_mtime)) if made.exists() else "",
        overrides=_overrides(folder),
        num_valid=len(valid),
        minutes=_median(result.minutes for result in valid),
        step_time_ms=_median(result.step_time_ms.median for result in valid if result.step_time_ms),
        tokens_s=_median(r.throughput_samples_s * tokens for r in valid if r.throughput_samples_s and tokens),
    )


def with_overrides(config_yaml: str, overrides: Sequence[str]) -> str:
    """Return a config.yaml that says in its first line which words of a command line it was composed of."""
    words = "".join(" " if steering(letter) else letter for letter in " ".join(overrides))
    return f"{_OVERRIDES}{words}\n{config_yaml}" if words else config_yaml


def _overrides(folder: Path) -> str:
    with suppress(OSError, UnicodeDecodeError), (folder / CONFIG).open(encoding="utf-8") as file:
        first = file.readline()
        return first.removeprefix(_OVERRIDES).strip() if first.startswith(_OVERRIDES) else ""
    return ""


def _results(folder: Path, plan: Plan | None) -> list[Result]:
    logs = [folder / trial.log for trial in plan.trials] if plan else sorted(folder.glob("result_*.txt"))
    found = []
    for log in logs:
        with suppress(BenchError):
            found.append(results.parse(log))
    return found


def _median(numbers: Iterable[float | None]) -> float | None:
    found = [number for number in numbers if number is not None]
    return median(found) if found else None
