"""What `parse` does with the logs of generation tasks."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from bench import masked_json

if TYPE_CHECKING:
    from bench.mlperf.result import Result
    from bench.results import GenerationResult


def parse(result: "Result", generation: "GenerationResult", *, as_json: bool) -> bool:
    """Print what the log of a generation task proves; return whether every answer was given as asked for."""
    from bench.console import generation as generation_sheets
    from bench.console import sheet
    from bench.report import generation as generation_report
    from bench.results import of

    is_proven = result.valid and generation.proven
    if as_json:
        about = {"file": result.file, "kind": "generate", "minutes": result.minutes, "status": result.status}
        problems = generation_report.problems(result, generation)
        measured = {"valid": is_proven, "problems": problems, "measurements": [asdict(one) for one in of(generation)]}
        print(masked_json.line(about | measured))
    else:
        for table in generation_sheets.sheets(result, generation):
            sheet.show(table)
    return is_proven
