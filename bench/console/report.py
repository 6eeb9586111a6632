"""Show which results a report holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.console.sheet import Sheet
from bench.mlperf.result import UNVERIFIED
from bench.report.compare import claim
from bench.report.numbers import minutes_text
from bench.report.sets import TrialSet

if TYPE_CHECKING:
    pass


def summary_sheet(sets: Sequence[TrialSet], written: Path | None) -> Sheet:
    """Return one line per set for the terminal, and where the page is."""
    rows = []
    for trials in sets:
        claimed = claim(trials)
        minutes = "" if claimed.minutes is None else minutes_text(claimed.minutes)
        why = f"; no score: {claimed.why_no_score}" if claimed.why_no_score else ""
        runs = f"{claimed.num_valid} of {len(trials.results)}"
        rows.append((trials.name, trials.hardware or "not logged", runs, minutes, claimed.what + why))
    columns = ("set", "hardware", "valid runs", "minutes", "of what")
    return Sheet(str(written or "not written: -o OUT does"), rows, columns=columns, caption=UNVERIFIED)
