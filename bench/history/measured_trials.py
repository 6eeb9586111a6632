"""Proven trials, as a run folder holds them: what each measured, when, and on what."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.contract import atomic_files, run_files
from bench.contract.plan import Plan
from bench.contract.run_files import LEDGER, RESULTS
from bench.errors import LogError
from bench.history import facts
from bench.mlperf.result import Result
from bench.results.kind import read
from bench.results.measurement import Measurement
from bench.runs import ledger
from bench.runs.folder import plan_in
from bench.runs.ledger import Entry, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenTrial:
    """One trial whose log proves that it did what its task asks."""

    folder: Path
    trial: int
    log_sha256: str
    began_ms: int
    """When its clock started, since 1970."""
    task: str
    measurements: Mapping[str, Measurement]
    facts: Mapping[str, str]
    logged: Mapping[str, str]
    """The settings that the log names."""
    planned: Mapping[str, str]
    """All settings; empty where there is no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The proven trials of some runs, and what was left out."""

    trials: tuple[ProvenTrial, ...]
    left_out: tuple[str, ...]
    """Trials that prove nothing, each with the reason."""


def in_folder(folder: Path) -> Runs:
    """Return what is proven in a run folder, or in a folder of logs without a ledger."""
    trials: list[ProvenTrial] = []
    left_out: list[str] = []
    plan = plan_in(folder)
    for number, (log, entry) in sorted(_logs(folder, plan, left_out).items()):
        try:
            trials.append(_trial(log, number, plan, entry=entry))
        except LogError as error:
            left_out.append(f"{folder.name}/{log.name}: {error.what}")
    return Runs(trials=tuple(trials), left_out=tuple(left_out))


def in_log(log: Path) -> Runs:
    """Return what a single log proves."""
    try:
        return Runs(trials=(_trial(log, 0, plan_in(log.parent), entry=None),), left_out=())
    except LogError as error:
        return Runs(trials=(), left_out=(f"{log.name}: {error.what}",))


def _logs(folder: Path, plan: Plan | None, left_out: list[str]) -> dict[int, tuple[Path, Entry | None]]:
    """Return the log of each trial that counts, with what the ledger says of it."""
    if not (folder / LEDGER).exists():
        return {number: (log, None) for number, log in enumerate(sorted(folder.glob(RESULTS)))}
    names = {trial.index: trial.log for trial in plan.trials} if plan else {}
    found: dict[int, tuple[Path, Entry | None]] = {}
    for entry in ledger.read(folder):
        if entry.outcome is Outcome.proven:
            name = names.get(entry.trial, run_files.result(entry.trial))
            found[entry.trial] = (folder / name, entry)
        else:
            left_out.append(f"{folder.name}: trial {entry.trial} is {entry.outcome}")
    return found


def _trial(log: Path, number: int, plan: Plan | None, *, entry: Entry | None) -> ProvenTrial:
    """Return a trial that its ledger calls proven; without a ledger, one that is valid.

    Raises:
        LogError: it proves nothing, or has changed since it was proven.
    """
    content = read(log)
    result, found = content.result, checksum(log, entry)
    if entry is None and not content.of_kind.valid:
        first = next(iter(content.of_kind.problems), "")
        what = f"not a valid trial: {first}" if first else "not a valid trial"
        raise LogError(what, where=str(log), fix=f"python -m bench parse {log}")
    if result.run_start_ms is None:
        raise LogError("no run_start", where=str(log), fix=f"python -m bench parse {log}")
    return ProvenTrial(
        folder=log.parent,
        trial=number,
        log_sha256=found,
        began_ms=result.run_start_ms,
        task=_task(result, plan),
        measurements={one.name: one for one in content.of_kind.measurements},
        facts=facts.of_trial(result, log.parent, number),
        logged=facts.logged_settings(content.log, result),
        planned=facts.planned_settings(plan),
    )


def checksum(log: Path, entry: Entry | None) -> str:
    """Return the checksum of a log.

    Raises:
        LogError: it is not the one that the ledger has of the log.
    """
    found = atomic_files.sha256(log)
    if entry is not None and entry.log_sha256 not in (None, found):
        raise LogError("the log has changed since its trial ended", where=str(log), fix="restore it", rule="LOG-18")
    return found


def _task(result: Result, plan: Plan | None) -> str:
    if plan is not None:
        return plan.config.task.name
    file = Path(str(result.hyperparameters.get("config_filename", "")))
    return file.stem if file.parent.name == "task" else result.benchmark or "training"
