"""What `parse` does with the files of other load generators."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bench import masked_json

if TYPE_CHECKING:
    from bench.results.imported import Summary
    from bench.results.kind import Judged


class Loads:
    """The files of other load generators among those to parse; their loads are shown beside ours at the end."""

    def __init__(self) -> None:
        self._found: list[Summary] = []
        self._ours: list[Summary] = []

    def read(self, path: Path, *, as_json: bool) -> bool:
        """Return whether a file is one of another tool, which is then read; raises LogError where it proves nothing."""
        from bench.results import imported

        if not path.is_file() or not imported.is_json(path):  # what a pipe gives is read once, as a log
            return False
        found = imported.read(path)
        self._found += found
        for one in found if as_json else ():
            print(masked_json.line({"file": str(path), "kind": "imported"} | asdict(one)))
        return True

    def keep(self, judged: "Judged") -> None:
        """Keep the loads of a log of ours: one that was packed, or came by a pipe, cannot be read a second time."""
        from bench.results.kind import KINDS

        if (summaries := KINDS[judged.kind].loads) is not None:
            self._ours += summaries(judged.of_kind)

    def show(self, *, as_json: bool) -> None:
        """Print the loads of other tools beside those of our own logs, where there are any."""
        from bench.console import sheet
        from bench.report import serving as serving_sheets

        if self._found and not as_json:
            sheet.show(serving_sheets.loads_of_tools([*self._ours, *self._found]))
