"""Judge one trial: check its log by our rules and the official checker, and compare it with the plan."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.contract import atomic_files, mllog
from bench.contract.checksums import CHANGED
from bench.contract.data import DataSource
from bench.contract.plan import Plan, Trial
from bench.contract.training import StartsFrom
from bench.errors import LogError, with_rule
from bench.mlperf import log as logs
from bench.mlperf import provenance_checks, settings
from bench.mlperf.log import Log
from bench.mlperf.result import parse
from bench.results.kind import Judged, judge
from bench.rules.finding import Finding, broken
from bench.runs import ledger
from bench.runs.ledger import Outcome

LOG_REMOVED = "find out what deletes files in this folder, such as a clean-up job; then run `runstop resume RUN`"


def unowned_log(folder: Path, trial: Trial, *, may_have_moved: bool = False) -> Finding | None:
    """Return the problem of a log that the trial's last attempt did not write.

    None if the attempt wrote it, if the log is missing, and for attempts of versions that wrote no nonce. In a folder
    that may have been moved, files have other inodes and owners, so that only the nonce is compared.
    """
    path, entries = folder / trial.log, ledger.entries(folder)
    nonce = entries[trial.index].nonce if trial.index < len(entries) else None
    if nonce is None or not os.path.lexists(path):
        return None
    try:
        log = logs.read(path)
        what = provenance_checks.nonce_mismatch(log, nonce)
        if what is None:
            what = None if may_have_moved else provenance_checks.copy_mismatch(log)
        else:
            what += owning_attempt(entries, log.events[0].value)
    except LogError as error:
        what = error.what
    return broken("LOG-17", f"{path.name} was not written by this attempt: {what}", str(path)) if what else None


def owning_attempt(entries: list[ledger.Entry], nonce: Any) -> str:
    """Return which other attempt of this run has a nonce, as the end of a sentence; empty if none has."""
    for entry in entries:
        for number, attempt in enumerate(entry.attempts, 1):
            if attempt.nonce is not None and attempt.nonce == nonce:
                return f": attempt {number} of trial {entry.trial} of this run"
    return ""


def close(folder: Path, plan: Plan, trial: Trial, *, failed: bool) -> Judged | None:
    """Judge a trial that has ended and record it in the ledger; return None for one that failed before run_stop.

    A failure after a successful run_stop does not change the result. A log that this attempt did not write is never
    judged.

    Raises:
        LogError: the trial succeeded and wrote no log, or another attempt wrote the log.
    """
    log = folder / trial.log
    if problem := unowned_log(folder, trial):
        ledger.end(folder, trial.index, Outcome.aborted, cause=problem.titled, not_as_planned=[problem.titled])
        if failed:
            return None
        raise _refused(problem)
    if not failed and not log.exists():
        what = f"{log.name} is missing, although the ranks ended without an error: the log was deleted during the trial"
        missing = LogError(what, where=str(log), fix=LOG_REMOVED, rule="LOG-01")
        titled = with_rule(missing.rule, what)
        ledger.end(folder, trial.index, Outcome.aborted, cause=titled, not_as_planned=[titled])
        raise missing
    if failed and not (log.exists() and parse(log).status == mllog.SUCCESS):
        ledger.end(folder, trial.index, Outcome.aborted, **content(log))
        return None
    judged = judge(log, plan, trial)
    differences = [problem.titled for problem in input_problems(folder, plan, trial, judged.log)]
    judged = replace(judged, differences=(*judged.differences, *differences))
    outcome = Outcome.valid if judged.valid else Outcome.invalid
    inputs = judged.result.inputs or None
    ledger.end(folder, trial.index, outcome, inputs=inputs, **facts(judged), **content(log))
    return judged


def input_problems(folder: Path, plan: Plan, trial: Trial, log: Log) -> Iterator[Finding]:
    """Yield what a trial read that is not what the run started with, or what other trials of the run read.

    The plan is that of the ledger. Rows and weights have no checksum before a run: trials are compared with each other.
    Logs of attempts that earlier versions began name no checksums, and are not checked.
    """
    entries, where = ledger.entries(folder), str(folder / trial.log)
    own = entries[trial.index] if trial.index < len(entries) else None
    if own is None or own.nonce is None or own.plan_sha256 is None:
        return
    if (changed := ledger.changed_plan(folder)) is not None:
        yield broken(CHANGED, changed.what, changed.where)
    if log.events and log.events[0].metadata.get("plan_sha256") != own.plan_sha256:
        yield broken(
            CHANGED, "the ranks of the trial read a plan that differs from the plan at the start of the run", where
        )
    inputs = settings.inputs(log)
    for name in _expected_inputs(plan):
        if name not in inputs:
            yield broken(
                CHANGED, f"the log has no checksum of the {name}: an earlier version of runstop wrote the log", where
            )
    for entry in entries:
        for name, sha256 in (entry.inputs or {}).items():
            if entry.trial != trial.index and inputs.get(name, sha256) != sha256:
                what = f"the SHA-256 of the {name} is {inputs[name]:.12}…, but {sha256:.12}… in trial {entry.trial}"
                yield broken(CHANGED, what, where)


def _expected_inputs(plan: Plan) -> list[str]:
    """Return the inputs whose checksums the log of a trial must name."""
    data, training = plan.config.data, plan.config.task.training
    has_rows = plan.inputs.rows is not None and not (data is not None and data.source is DataSource.program)
    has_own_weights = training is not None and training.starts_from is StartsFrom.program
    rows = [mllog.TRAIN_ROWS, mllog.EVAL_ROWS] if has_rows else []
    return rows + ([mllog.CHECKPOINT_FILES] if plan.inputs.checkpoint is not None and not has_own_weights else [])


def require_own(folder: Path, trial: Trial) -> None:
    """Raise LogError if a trial's log is not the one that its last attempt wrote."""
    if problem := unowned_log(folder, trial):
        raise _refused(problem)


def _refused(problem: Finding) -> LogError:
    return LogError(problem.what, where=problem.where, fix=problem.fix, rule=problem.rule)


def settle(folder: Path, plan: Plan, trial: Trial) -> None:
    """Judge and record a trial that succeeded, if its job was interrupted before it could do so."""
    log = folder / trial.log
    if ledger.read(folder)[trial.index].outcome is not Outcome.running:
        return
    if problem := unowned_log(folder, trial):
        ledger.end(folder, trial.index, Outcome.interrupted, cause=problem.titled)
    elif log.exists() and parse(log).status == mllog.SUCCESS:
        close(folder, plan, trial, failed=False)


def content(log: Path) -> dict[str, Any]:
    """Return checksum and size of a log as fields of the ledger; empty if the log is missing."""
    if not log.exists():
        return {}
    kept = atomic_files.checksum(log)
    return {"log_sha256": kept.sha256, "log_bytes": kept.bytes}


def facts(judged: Judged) -> dict[str, Any]:
    """Return the fields of the ledger that a finished trial fills, except its outcome."""
    result = judged.result
    return {
        "minutes": result.minutes,
        "samples_to_target": result.samples_to_target,
        "eval_final": result.eval_final,
        "official": {verdict.ruleset: verdict.passed for verdict in judged.verdicts},
        "not_as_planned": [*judged.differences, *judged.of_kind.problems],
    }
