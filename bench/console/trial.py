"""Show what one trial is worth, with its figure."""

from pathlib import Path

from bench.contract import run_files
from bench.contract.plan import Trial
from bench.runs.folder import short
from bench.runs.trial import Judged


def show(folder: Path, trial: Trial, judged: Judged) -> None:
    """Draw the trial's figure, if its losses mean anything, and print what it is worth."""
    from bench.console import generation, kernels, serving, sheet
    from bench.console import result as result_sheets
    from bench.report import figures

    files = [("log", short(folder / trial.log), "")]
    planned = [("as planned", "yes" if not judged.not_as_planned else "no", "; ".join(judged.not_as_planned))]
    if judged.kernels is not None:
        for table in kernels.sheets(judged.result, judged.kernels, more=[*planned, *files]):
            sheet.show(table)
        return
    if judged.generation is not None:
        rows = [("answers", short(folder / run_files.answers(trial.index)), ""), *files]
        for table in generation.sheets(judged.result, judged.generation, more=[*planned, *rows]):
            sheet.show(table)
        return
    if judged.serving is not None:
        for table in serving.sheets(judged.result, judged.serving, more=[*planned, *files]):
            sheet.show(table)
        return
    if not judged.result.has_random_rows:
        figure = folder / run_files.loss_figure(trial.index)
        figures.loss_figure(judged.result, figure)
        files.append(("figure", short(figure), ""))
    sheet.show(result_sheets.verdict_sheet(judged.result, judged.verdicts, more=files))
