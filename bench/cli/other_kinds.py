"""What `parse` and `report` do with the logs of tasks that train nothing: whose kind a log is, it says itself."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import masked_json
from bench.cli import generation_reading, kernel_reading, serving_reading
from bench.errors import ConfigError, LogError

if TYPE_CHECKING:
    from bench.console.sheet import Sheet
    from bench.mlperf.log import Log
    from bench.mlperf.result import Result
    from bench.report.trials import ReadTrial

    Trials = Sequence[ReadTrial[Any]]


def parse(log: "Log", result: "Result", args: argparse.Namespace, others: serving_reading.Others) -> bool | None:
    """Print what a log proves, and return whether its task was done; None for the log of a training task.

    `others` keeps the loads of a server.

    Raises:
        LogError: something is asked of it that only logs of training can answer.
    """
    from bench.results import GenerationResult, KernelsResult, of_kind

    found = of_kind(log)
    if found is None:
        return None
    if unused := [f"--{name.replace('_', '-')}" for name in ("official", "num_gpus") if getattr(args, name)]:
        raise LogError(
            f"{' and '.join(unused)} with the log of a task that trains nothing",
            where=result.file,
            fix="leave that out for this log: only logs of training have a use for it",
        )
    if isinstance(found, KernelsResult):
        return kernel_reading.parse(result, found, as_json=args.json)
    if isinstance(found, GenerationResult):
        return generation_reading.parse(result, found, as_json=args.json)
    others.keep(found)
    return serving_reading.parse(result, found, as_json=args.json)


class Shown(NamedTuple):
    """How the trials of one kind are shown."""

    sheets: "Callable[[ReadTrial[Any]], Iterable[Sheet]]"
    title: "Callable[[ReadTrial[Any]], str]"
    csv_text: "Callable[[Trials], str]"
    write: Callable[..., Path]


def report(folders: Sequence[Path], args: argparse.Namespace) -> int | None:
    """Print what runs measured, write their page where a folder is named, and return the exit code; None if they train.

    Raises:
        ConfigError: they are of different kinds, --num-gpus is given, or the folder cannot be written.
        LogError: a log cannot be read.
    """
    from bench.console import sheet
    from bench.report.trials import load
    from bench.results import of

    trials = load(folders)
    if not trials:
        return None
    if args.num_gpus is not None:
        raise ConfigError(
            "--num-gpus with logs of a task that trains nothing",
            where=trials[0].result.file,
            fix="leave that out: only logs of training have a use for it",
        )
    shown = _shown(trials[0])
    if args.json:
        for trial in trials:
            measured = [asdict(one) for one in of(trial.found)]
            row = {"trial": trial.name, "valid": trial.is_proven, "measurements": measured}
            print(masked_json.line(row))
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
    from bench.report import generation, kernels, serving
    from bench.results import GenerationResult, KernelsResult

    if isinstance(trial.found, KernelsResult):
        return Shown(
            lambda one: (*kernel_sheets.sheets(one.result, one.found), kernel_sheets.points_sheet(one.found)),
            lambda one: kernels.title(one.result),
            kernels.csv_text,
            kernels.write,
        )
    if isinstance(trial.found, GenerationResult):
        return Shown(
            lambda one: generation_sheets.sheets(one.result, one.found),
            lambda one: generation.title(one.result),
            generation.csv_text,
            generation.write,
        )
    return Shown(
        lambda one: serving_sheets.sheets(one.result, one.found),
        lambda one: serving.title(one.result, one.found),
        serving.csv_text,
        serving.write,
    )
