"""What `parse` and `report` do with the logs of kernels tasks."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.mlperf.result import Result
    from bench.report.kernels import KernelsTrial
    from bench.results import KernelsResult


def parse(result: "Result", kernels: "KernelsResult", *, as_json: bool) -> bool:
    """Print what the log of a kernels task proves, point by point; return whether it was done."""
    from bench.console import kernels as kernel_sheets
    from bench.console import sheet
    from bench.results import of

    is_proven = result.valid and kernels.proven
    if as_json:
        about = {"file": result.file, "kind": "kernels", "minutes": result.minutes, "status": result.status}
        problems = [*(f.what for f in result.findings if f.severity == "error"), *kernels.problems]
        measured = {"valid": is_proven, "problems": problems, "measurements": [asdict(one) for one in of(kernels)]}
        print(json.dumps(about | measured))
    else:
        for table in (*kernel_sheets.sheets(result, kernels), kernel_sheets.points_sheet(kernels)):
            sheet.show(table)
    return is_proven


def report(trials: "Sequence[KernelsTrial]", args: argparse.Namespace) -> int:
    """Print every point of kernels tasks, and write their table and figures where a folder is named."""
    from bench.console import kernels as kernel_sheets
    from bench.console import sheet
    from bench.report import kernel_rows, kernels
    from bench.results import of

    if args.json:
        for trial in trials:
            measured = [asdict(one) for one in of(trial.kernels)]
            print(json.dumps({"trial": trial.name, "valid": trial.is_proven, "measurements": measured}))
    elif args.csv:
        print(kernels.csv_text(trials), end="")
    else:
        for trial in trials:
            for table in kernel_sheets.sheets(trial.result, trial.kernels):
                sheet.show(table)
            sheet.show(kernel_sheets.points_sheet(trial.kernels))
    if args.out:
        heading = args.title or kernel_rows.title(trials[-1].result)
        print(kernels.write(trials, args.out, heading=heading), file=sys.stderr)
    return 0 if all(trial.is_proven for trial in trials) else 1
