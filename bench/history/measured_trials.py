"""Read the valid trials of a run folder: measurements, start time, hardware, software and settings."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.contract import atomic_files, run_files
from bench.contract.plan import Plan
from bench.contract.run_files import LEDGER, RESULTS
from bench.errors import LogError
from bench.history import facts
from bench.history.node_verdicts import NodeVerdict
from bench.mlperf.result import Result
from bench.results.kind import read
from bench.results.measurement import Measurement
from bench.runs import ledger
from bench.runs.folder import plan_in
from bench.runs.ledger import Entry, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidTrial:
    """One valid trial."""

    folder: Path
    trial: int
    log_sha256: str
    began_ms: int
    """Time of run_start, in milliseconds since 1970."""
    task: str
    measurements: Mapping[str, Measurement]
    facts: Mapping[str, str]
    logged: Mapping[str, str]
    """The settings in the log."""
    planned: Mapping[str, str]
    """The settings in the plan; empty without a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The valid trials of some runs, and the reasons why others are left out."""

    trials: tuple[ValidTrial, ...]
    left_out: tuple[str, ...]
    """Trials that are not valid, each with the reason."""
    nodes: tuple[NodeVerdict, ...] = ()
    """What the runs found out about their nodes; only in `store`."""


def in_folder(folder: Path) -> Runs:
    """Return the valid trials of a run folder, or of a folder of logs without a ledger."""
    trials: list[ValidTrial] = []
    left_out: list[str] = []
    plan = plan_in(folder)
    for number, (log, entry) in sorted(_logs(folder, plan, left_out).items()):
        try:
            trials.append(_trial(log, number, plan, entry=entry))
        except LogError as error:
            left_out.append(f"{folder.name}/{log.name}: {error.what}")
    return Runs(trials=tuple(trials), left_out=tuple(left_out))


def in_log(log: Path) -> Runs:
    """Return the trial of a single log."""
    try:
        return Runs(trials=(_trial(log, 0, plan_in(log.parent), entry=None),), left_out=())
    except LogError as error:
        return Runs(trials=(), left_out=(f"{log.name}: {error.what}",))


def _logs(folder: Path, plan: Plan | None, left_out: list[str]) -> dict[int, tuple[Path, Entry | None]]:
    """Return the log of each valid trial, with its entry in the ledger."""
    if not (folder / LEDGER).exists():
        return {number: (log, None) for number, log in enumerate(sorted(folder.glob(RESULTS)))}
    names = {trial.index: trial.log for trial in plan.trials} if plan else {}
    logs: dict[int, tuple[Path, Entry | None]] = {}
    for entry in ledger.read(folder):
        if entry.outcome is Outcome.valid:
            name = names.get(entry.trial, run_files.result(entry.trial))
            logs[entry.trial] = (folder / name, entry)
        else:
            left_out.append(f"{folder.name}: trial {entry.trial} is {entry.outcome}")
    return logs


def _trial(log: Path, number: int, plan: Plan | None, *, entry: Entry | None) -> ValidTrial:
    """Return a trial that is valid by its ledger or, without a ledger, by its log.

    Raises:
        LogError: the trial is not valid, or its log has changed since it was judged.
    """
    content = read(log)
    result, sha256 = content.result, checksum(log, entry)
    if entry is None and not content.of_kind.valid:
        problem = next(iter(content.of_kind.problems), "")
        what = f"the trial is not valid: {problem}" if problem else "the trial is not valid"
        raise LogError(what, where=str(log), fix=f"to see all problems: runstop parse {shlex.quote(str(log))}")
    if result.run_start_ms is None:
        fix = f"to see all problems: runstop parse {shlex.quote(str(log))}"
        raise LogError("the log has no run_start", where=str(log), fix=fix)
    return ValidTrial(
        folder=log.parent,
        trial=number,
        log_sha256=sha256,
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
        LogError: it differs from the checksum in the ledger.
    """
    sha256 = atomic_files.sha256(log)
    if entry is not None and entry.log_sha256 not in (None, sha256):
        fix = "restore the original log from a copy"
        raise LogError("the log has changed since its trial ended", where=str(log), fix=fix, rule="LOG-18")
    return sha256


def _task(result: Result, plan: Plan | None) -> str:
    if plan is not None:
        return plan.config.task.name
    file = Path(str(result.hyperparameters.get("config_filename", "")))
    return file.stem if file.parent.name == "task" else result.benchmark or "training"
