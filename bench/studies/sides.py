"""Runs to compare, as a user names them. Those of a study have the numbers of its tables, over its window of steps."""

from dataclasses import replace

from bench.errors import LogError
from bench.history import sides
from bench.history.proven import ProvenTrial, Runs
from bench.history.sides import Side
from bench.studies import arms, folder, measured


def side(text: str) -> Side:
    """Return the runs that a user means, as `bench.history.sides.side` does.

    Raises:
        ConfigError: there are no runs, or the study that they are of cannot be read.
    """
    found = sides.side(text)
    trials: list[ProvenTrial] = []
    left_out = list(found.runs.left_out)
    for trial in found.runs.trials:
        try:
            trials.append(_as_in_study(trial))
        except LogError as error:
            left_out.append(f"{trial.folder.name}: {error.what}")
    return replace(found, runs=Runs(trials=tuple(trials), left_out=tuple(left_out)))


def _as_in_study(trial: ProvenTrial) -> ProvenTrial:
    """Return a trial with the numbers that its study's tables have of it; one of no study as it is."""
    slug = sides.arm_of(trial.folder)
    if not slug:
        return trial
    kept = folder.kept(trial.folder.parent)
    arm = next((arm for arm in arms.of(kept.study, where=folder.STUDY) if arm.slug == slug), None)
    if arm is None:
        return trial
    numbers = measured.of_run(trial.folder, arm, window=kept.study.window).numbers
    return replace(trial, measurements=numbers)
