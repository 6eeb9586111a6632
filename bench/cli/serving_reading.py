"""What `parse` does with the logs of serving tasks, and with the files of other load generators."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench import masked_json

if TYPE_CHECKING:
    from bench.mlperf.result import Result
    from bench.results import ServingResult
    from bench.results.imported import Summary


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
        measured |= {"measurements": [asdict(one) for one in of(serving)]}
        print(masked_json.line(about | measured))
    else:
        for table in serving_sheets.sheets(result, serving):
            sheet.show(table)
        if found := (*result.findings, *serving.findings):
            sheet.show(result_sheets.findings_sheet(found))
    return is_proven


class Others:
    """The files of other load generators among those to parse; their loads are shown beside ours at the end."""

    def __init__(self) -> None:
        self._found: list[Summary] = []
        self._ours: list[Summary] = []

    def take(self, path: Path, *, as_json: bool) -> bool:
        """Return whether a file is one of another tool, which is then read; raises LogError where it proves nothing."""
        from bench.results import imported

        if not path.is_file() or not imported.is_json(path):  # what a pipe gives is read once, as a log
            return False
        found = imported.read(path)
        self._found += found
        for one in found if as_json else ():
            print(masked_json.line({"file": str(path), "kind": "imported"} | asdict(one)))
        return True

    def keep(self, result: "ServingResult") -> None:
        """Keep the loads of a log of ours: one that was packed, or came by a pipe, cannot be read a second time."""
        from bench.results import serving

        self._ours += serving.summaries(result)

    def show(self, *, as_json: bool) -> None:
        """Print the loads of other tools beside those of our own logs, where there are any."""
        from bench.console import serving as serving_sheets
        from bench.console import sheet

        if self._found and not as_json:
            sheet.show(serving_sheets.beside([*self._ours, *self._found]))
