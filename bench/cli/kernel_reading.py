"""What `parse` does with the logs of kernels tasks."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from bench import masked_json

if TYPE_CHECKING:
    from bench.mlperf.result import Result
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
        print(masked_json.line(about | measured))
    else:
        for table in (*kernel_sheets.sheets(result, kernels), kernel_sheets.points_sheet(kernels)):
            sheet.show(table)
    return is_proven
