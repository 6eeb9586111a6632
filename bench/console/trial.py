"""Show the result of one trial, and draw its figures."""

from pathlib import Path

from bench.console import sheet
from bench.contract.plan import Trial
from bench.report import kinds
from bench.report.kinds import ShownTrial
from bench.results.kind import KINDS, Judged
from bench.runs.folder import short


def show(folder: Path, trial: Trial, judged: Judged) -> None:
    """Draw the trial's figures, and print its result."""
    shown = kinds.report_of(judged.kind)
    files = [(name, short(Path(path)), why) for name, path, why in shown.files(folder, trial.index, judged.of_kind)]
    rows = [("log", short(folder / trial.log), ""), *files]
    if not KINDS[judged.kind].has_official_rules:
        rows.insert(0, ("as planned", "no" if judged.differences else "yes", "; ".join(judged.differences)))
    for table in shown.tables(ShownTrial(trial.log, judged), more=rows):
        sheet.show(table)
