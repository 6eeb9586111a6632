"""What `parse` does with the logs of serving tasks."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.mlperf.result import Result
    from bench.results import ServingResult


def parse(result: "Result", serving: "ServingResult", *, as_json: bool) -> bool:
    """Print what the log of a serving task proves, load by load; return whether it was done."""
    from bench.console import result as result_sheets
    from bench.console import serving as serving_sheets
    from bench.console import sheet
    from bench.results import of

    is_proven = result.valid and serving.proven
    if as_json:
        about = {"file": result.file, "kind": "serve", "minutes": result.minutes, "status": result.status}
        problems = [*(f.titled for f in result.findings if f.severity == "error"), *serving.problems]
        loads = [{"load": one.load.name, "loadgen": one.validity, "reason": one.reason} for one in serving.loads]
        measured = {"valid": is_proven, "problems": problems, "loads": loads}
        print(json.dumps(about | measured | {"measurements": [asdict(one) for one in of(serving)]}))
    else:
        for table in serving_sheets.sheets(result, serving):
            sheet.show(table)
        if found := (*result.findings, *serving.findings):
            sheet.show(result_sheets.findings_sheet(found))
    return is_proven
