"""What came of one trial: its log as we and the referee read it, against what was planned."""

import os
from pathlib import Path
from typing import Any

from bench.contract import atomic_files, mllog
from bench.contract.plan import Plan, Trial
from bench.errors import LogError
from bench.mlperf import log as logs
from bench.mlperf import provenance_checks
from bench.mlperf.result import parse
from bench.results.kind import Judged, judge
from bench.rules.finding import Finding, broken
from bench.runs import ledger
from bench.runs.ledger import Outcome


def foreign(folder: Path, trial: Trial, *, may_have_moved: bool = False) -> Finding | None:
    """Return that a trial's log is not the file that its last attempt wrote.

    None if it is, if there is no log, and for attempts of versions that bound no logs. A folder that may have moved
    has files of other inodes and owners, so that only the nonce counts.
    """
    path, entries = folder / trial.log, ledger.found(folder)
    nonce = entries[trial.index].nonce if trial.index < len(entries) else None
    if nonce is None or not os.path.lexists(path):
        return None
    try:
        log = logs.read(path)
        what = provenance_checks.stranger(log, nonce)
        if what is None:
            what = None if may_have_moved else provenance_checks.copied(log)
        else:
            what += whose(entries, log.events[0].value)
    except LogError as error:
        what = error.what
    return broken("LOG-17", f"{path.name} was not written by this attempt: {what}", str(path)) if what else None


def whose(entries: list[ledger.Entry], nonce: Any) -> str:
    """Return which other attempt of this run a nonce belongs to, as the end of a sentence."""
    for entry in entries:
        for number, attempt in enumerate(entry.attempts, 1):
            if attempt.nonce is not None and attempt.nonce == nonce:
                return f": attempt {number} of trial {entry.trial} of this run"
    return ""


def close(folder: Path, plan: Plan, trial: Trial, *, failed: bool) -> Judged | None:
    """Judge a trial that has ended and enter it in the ledger; None, and aborted, for one that failed before its end.

    A failure after a successful run_stop does not undo it. A log that this attempt did not write is never judged.

    Raises:
        LogError: the trial ended well, and left no log, or there is one that it did not write.
    """
    log = folder / trial.log
    if found := foreign(folder, trial):
        ledger.end(folder, trial.index, Outcome.aborted, cause=found.titled, not_as_planned=[found.titled])
        if failed:
            return None
        raise _refused(found)
    if failed and not (log.exists() and parse(log).status == mllog.SUCCESS):
        ledger.end(folder, trial.index, Outcome.aborted, **content(log))
        return None
    judged = judge(log, plan, trial)
    outcome = Outcome.proven if judged.valid else Outcome.not_proven
    ledger.end(folder, trial.index, outcome, **facts(judged), **content(log))
    return judged


def require_own(folder: Path, trial: Trial) -> None:
    """Raise LogError if a trial's log is not the one that its last attempt wrote."""
    if found := foreign(folder, trial):
        raise _refused(found)


def _refused(found: Finding) -> LogError:
    return LogError(found.what, where=found.where, fix=found.fix, rule=found.rule)


def settle(folder: Path, plan: Plan, trial: Trial) -> None:
    """Enter a trial whose log says that it ended well, if its job was cut short before it could enter it."""
    log = folder / trial.log
    if ledger.read(folder)[trial.index].outcome is not Outcome.running:
        return
    if found := foreign(folder, trial):
        ledger.end(folder, trial.index, Outcome.interrupted, cause=found.titled)
    elif log.exists() and parse(log).status == mllog.SUCCESS:
        close(folder, plan, trial, failed=False)


def content(log: Path) -> dict[str, Any]:
    """Return what the ledger keeps of the file itself; nothing where there is none."""
    if not log.exists():
        return {}
    kept = atomic_files.of(log)
    return {"log_sha256": kept.sha256, "log_bytes": kept.bytes}


def facts(judged: Judged) -> dict[str, Any]:
    """Return what the ledger keeps of a finished trial besides its outcome."""
    result = judged.result
    return {
        "minutes": result.minutes,
        "samples_to_target": result.samples_to_target,
        "eval_final": result.eval_final,
        "official": {verdict.ruleset: verdict.passed for verdict in judged.verdicts},
        "not_as_planned": [*judged.differences, *judged.of_kind.problems],
    }
