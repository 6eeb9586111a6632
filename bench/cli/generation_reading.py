"""What `parse` and `report` do with the logs of generation tasks."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.mlperf.result import Result
    from bench.report.generation import GenerationTrial
    from bench.results import GenerationResult


def parse(result: "Result", generation: "GenerationResult", *, as_json: bool) -> bool:
    """Print what the log of a generation task proves; return whether every answer was given as asked for."""
    from bench.console import generation as generation_sheets
    from bench.console import sheet
    from bench.report import generation_rows
    from bench.results import of

    is_proven = result.valid and generation.proven
    if as_json:
        about = {"file": result.file, "kind": "generate", "minutes": result.minutes, "status": result.status}
        problems = generation_rows.problems(result, generation)
        measured = {"valid": is_proven, "problems": problems, "measurements": [asdict(one) for one in of(generation)]}
        print(json.dumps(about | measured))
    else:
        for table in generation_sheets.sheets(result, generation):
            sheet.show(table)
    return is_proven


def report(trials: "Sequence[GenerationTrial]", args: argparse.Namespace) -> int:
    """Print what generation tasks took, and write their answers and the figure where a folder is named."""
    from bench.console import generation as generation_sheets
    from bench.console import sheet
    from bench.report import generation, generation_rows
    from bench.results import of

    if args.json:
        for trial in trials:
            measured = [asdict(one) for one in of(trial.generation)]
            print(json.dumps({"trial": trial.name, "valid": trial.is_proven, "measurements": measured}))
    elif args.csv:
        print(generation.csv_text(trials), end="")
    else:
        for trial in trials:
            for table in generation_sheets.sheets(trial.result, trial.generation):
                sheet.show(table)
    if args.out:
        heading = args.title or generation_rows.title(trials[-1].result)
        print(generation.write(trials, args.out, heading=heading), file=sys.stderr)
    return 0 if all(trial.is_proven for trial in trials) else 1
