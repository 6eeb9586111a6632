"""What `parse` and `report` do with the logs of tasks that train nothing: whose kind a log is, it says itself."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.cli import generation_reading, kernel_reading, serving_reading
from bench.contract import secrets

if TYPE_CHECKING:
    from bench.console.sheet import Sheet
    from bench.mlperf.log import Log
    from bench.mlperf.result import Result
    from bench.report.trials import ReadTrial

    Trials = Sequence[ReadTrial[Any]]


def parse(log: "Log", result: "Result", *, as_json: bool) -> bool | None:
    """Print what a log proves, and return whether its task was done; None for the log of a training task."""
    from bench.results import GenerationResult, KernelsResult, of_kind

    found = of_kind(log)
    if found is None:
        return None
    if isinstance(found, KernelsResult):
        return kernel_reading.parse(result, found, as_json=as_json)
    if isinstance(found, GenerationResult):
        return generation_reading.parse(result, found, as_json=as_json)
    return serving_reading.parse(result, found, as_json=as_json)


class Shown(NamedTuple):
    """How the trials of one kind are shown."""

    sheets: "Callable[[ReadTrial[Any]], Iterable[Sheet]]"
    title: "Callable[[ReadTrial[Any]], str]"
    csv_text: "Callable[[Trials], str]"
    write: Callable[..., Path]


def report(folders: Sequence[Path], args: argparse.Namespace) -> int | None:
    """Print what runs measured, write their page where a folder is named, and return the exit code; None if they train.

    Raises:
        ConfigError: they are of different kinds, or the folder cannot be written.
        LogError: a log cannot be read.
    """
    from bench.console import sheet
    from bench.report.trials import load
    from bench.results import of

    trials = load(folders)
    if not trials:
        return None
    shown = _shown(trials[0])
    if args.json:
        for trial in trials:
            measured = [asdict(one) for one in of(trial.found)]
            row = {"trial": trial.name, "valid": trial.is_proven, "measurements": measured}
            print(json.dumps(secrets.masked_all(row)))
    elif args.csv:
        print(shown.csv_text(trials), end="")
    else:
        for trial in trials:
            for table in shown.sheets(trial):
                sheet.show(table)
    if args.out:
        heading = args.title or shown.title(trials[-1])
        print(shown.write(trials, args.out, heading=heading), file=sys.stderr)
    return 0 if all(trial.is_proven for trial in trials) else 1


def _shown(trial: "ReadTrial[Any]") -> Shown:
    """Return how the trials of this one's kind are shown."""
    from bench.console import generation as generation_sheets
    from bench.console import kernels as kernel_sheets
    from bench.console import serving as serving_sheets
    from bench.report import generation, generation_rows, kernel_rows, kernels, serving, serving_rows
    from bench.results import GenerationResult, KernelsResult

    if isinstance(trial.found, KernelsResult):
        return Shown(
            lambda one: (*kernel_sheets.sheets(one.result, one.found), kernel_sheets.points_sheet(one.found)),
            lambda one: kernel_rows.title(one.result),
            kernels.csv_text,
            kernels.write,
        )
    if isinstance(trial.found, GenerationResult):
        return Shown(
            lambda one: generation_sheets.sheets(one.result, one.found),
            lambda one: generation_rows.title(one.result),
            generation.csv_text,
            generation.write,
        )
    return Shown(
        lambda one: serving_sheets.sheets(one.result, one.found),
        lambda one: serving_rows.title(one.result, one.found),
        serving.csv_text,
        serving.write,
    )
