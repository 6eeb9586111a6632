"""Read the result files of other load generators in `parse`."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.results.imported import Summary
    from bench.results.kind import Judged


class Loads:
    """Collects loads from files of other load generators and from our logs, and shows them in one table at the end."""

    def __init__(self) -> None:
        self._imported: list[Summary] = []
        self._ours: list[Summary] = []

    def read(self, path: Path, *, as_json: bool) -> bool:
        """Read the file if another tool wrote it; return whether it did. Raises LogError if it has no result."""
        from bench.results import imported

        if not path.is_file() or not imported.is_json(path):  # a pipe can be read only once, as a log
            return False
        summaries = imported.read(path)
        self._imported += summaries
        if as_json:
            from bench import answers

            answers.show(*(answers.imported_load(path, one) for one in summaries))
        return True

    def keep(self, judged: "Judged") -> None:
        """Keep the loads of one of our logs: a pipe cannot be read a second time."""
        from bench.results.kind import KINDS

        if (summaries := KINDS[judged.kind].loads) is not None:
            self._ours += summaries(judged.of_kind)

    def show(self, *, as_json: bool) -> None:
        """Print the loads of other tools next to those of our own logs, if there are any."""
        from bench.console import sheet
        from bench.report import serving as serving_sheets

        if self._imported and not as_json:
            sheet.show(serving_sheets.loads_of_tools([*self._ours, *self._imported]))
