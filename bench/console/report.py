"""Show which results a report holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.console.sheet import Sheet
from bench.mlperf.result import UNVERIFIED
from bench.report.compare import TrialSet, claim
from bench.report.figures import minutes_text

if TYPE_CHECKING:
    pass


def summary_sheet(sets: Sequence[TrialSet], written: Path | None) -> Sheet:
    """Return one line per set for the terminal, and where the page is."""
    rows = []
    for trials in sets:
        said = claim(trials)
        minutes = "" if said.minutes is None else minutes_text(said.minutes)
        why = f"; no score: {said.why_no_score}" if said.why_no_score else ""
        runs = f"{said.num_valid} of {len(trials.results)}"
        rows.append((trials.name, trials.hardware or "not logged", runs, minutes, said.what + why))
    columns = ("set", "hardware", "valid runs", "minutes", "of what")
    return Sheet(str(written or "not written: -o OUT does"), rows, columns=columns, caption=UNVERIFIED)
