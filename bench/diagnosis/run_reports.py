"""Read the error reports in a run folder: of failed ranks, of the launcher (status.json) and of the ledger.

A failed rank writes rank_logs/*.error (`jobs.ranks.guard`). The launcher writes status.json and ledger.json
(`bench.driver.drive`). These files have the rule in its own field.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.backends.protocol import Job, JobState
from bench.contract import atomic_files
from bench.contract.run_files import JOB, LEDGER, RANK_LOGS, STATUS
from bench.diagnosis import log_scan
from bench.diagnosis.log_scan import Clue, Scan
from bench.mlperf.reader import is_number
from bench.rules import RULES
from bench.rules.signs import Weight
from bench.runs import status as statuses
from bench.runs.older_outcomes import with_current_outcome
from bench.runs.trial import LOG_REMOVED

CANCELLED, STOPPED_HERE = "SLU-08", "RUN-24"
"""The rules of a run that was stopped: of a job, and of one without a queue."""
_START_AGAIN = (
    "`runstop resume RUN` resumes the run and keeps the finished trials. Ctrl-C sends SIGINT; "
    "`kill`, a logout or a shutdown sends SIGTERM"
)
"""The fix for a local run that was stopped."""
_TRACEBACK = "Traceback (most recent call last)"


def status(folder: Path) -> dict[str, Any]:
    """Return the launcher's final status; empty while the run is running, and if the launcher was killed."""
    last = with_current_outcome(atomic_files.read_object(folder / STATUS))
    return last | {"fix": statuses.in_folder(last["fix"], folder)} if "fix" in last else last


def all_reports(folder: Path) -> Iterator[Scan]:
    """Yield all reports; among equal weights the first one explains the rest."""
    yield from ledger_reports(folder)
    yield from rank_reports(folder)
    yield from launcher_report(folder)


def rank_reports(folder: Path) -> list[Scan]:
    """Return the error report of each failed rank, the earliest first: later ones are often consequences."""
    reports = [
        (report, path)
        for path in sorted((folder / RANK_LOGS).glob("*.error"))
        if (report := atomic_files.read_object(path))
    ]
    reports.sort(key=lambda pair: pair[0]["time"] if is_number(pair[0].get("time")) else 0)
    return [_scan(report, str(path)) for report, path in reports]


def launcher_report(folder: Path) -> list[Scan]:
    """Return what only the launcher knows: the signal that stopped it, or how a rank ended."""
    last, file = status(folder), str(folder / STATUS)
    is_batch = (folder / JOB).exists()
    if last.get("outcome") == "interrupted":
        what = log_scan.shown(str(last.get("what") or f"the launcher got {_signal(last.get('exit_code'))}").encode())
        fix = last.get("fix") or (None if is_batch else _START_AGAIN)
        rule = str(last.get("rule") if last.get("rule") in RULES else CANCELLED)
        if rule == CANCELLED and not is_batch:
            rule = STOPPED_HERE
        # Rank reports about other ranks follow from this signal, unless one names a cause.
        return [_only(Clue(rule, Weight.DEATH, file, 1, what, fix))]
    scans = _launcher_message(last, file, is_batch=is_batch)
    weighed = [
        replace(scan, clues=tuple(_with_launcher_weight(clue, is_batch=is_batch) for clue in scan.clues))
        for scan in scans
    ]
    return weighed + _earlier_explanation(last, file)


def _launcher_message(last: dict[str, Any], file: str, *, is_batch: bool) -> list[Scan]:
    """Return the message of the launcher or the batch script itself.

    If the run was diagnosed when it ended, `what` is the title of the diagnosis and `while` is the original message.
    """
    is_explained = "evidence" in last or "while" in last
    words = last.get("while" if is_explained else "what")
    if not isinstance(words, str):
        return []
    scan = _scan({"what": words} if is_explained else last | {"what": words}, file)
    # A batch script without Python knows what failed (trial 1); the logs may show why.
    is_vague = (is_batch or is_explained) and all(clue.rule == "RUN-10" for clue in scan.clues)
    return [] if is_vague else [scan]


def _with_launcher_weight(clue: Clue, *, is_batch: bool) -> Clue:
    """Return a clue with its weight: a batch script that ends its run knows the cause, a launcher only the limit."""
    if clue.rule == "RUN-10":
        return replace(clue, weight=Weight.OUTCOME)
    return replace(clue, weight=Weight.CAUSE) if is_batch and clue.weight is Weight.END else clue


def _earlier_explanation(last: dict[str, Any], file: str) -> list[Scan]:
    """Return the diagnosis from the end of the job, for a run whose logs have been deleted."""
    rule, evidence = last.get("rule"), last.get("evidence")
    if rule not in RULES or not isinstance(evidence, str):
        return []
    place, line = last.get("file"), last.get("line")
    file, line = (place, line) if isinstance(place, str) and isinstance(line, int) else (file, 1)
    return [_only(Clue(rule, Weight.HINT, file, line, evidence, last.get("fix")))]


def queue_report(job: Job | None, file: str) -> list[Scan]:
    """Return the backend's reason why a job waits or has failed."""
    if job is None or job.state not in (JobState.queued, JobState.running, JobState.failed):
        return []
    text = log_scan.shown(f"{job.native_state}: {job.reason}".encode())
    if job.rule in RULES:
        return [_only(Clue(job.rule, Weight.CAUSE, file, 1, text))]
    scan = log_scan.read_text(job.reason, file=file) if job.state is JobState.failed else None
    return [scan] if scan is not None and scan.clues else []


def ledger_reports(folder: Path) -> list[Scan]:
    """Return the logs in the folder that this run did not write, and those that were removed."""
    file, scans = folder / LEDGER, []
    for entry in _entries(file):
        what = _first_difference(entry)
        fix = {"LOG-17": RULES["LOG-17"].fix, "LOG-01": LOG_REMOVED}.get(what.partition(": ")[0])
        if entry.get("outcome") == "aborted" and fix:
            scans.append(_only(log_scan.read_message(what, fix, file=str(file))))
    return scans


def invalid_trials(folder: Path) -> Iterator[Clue]:
    """Yield the trials that finished and whose log does not match the plan."""
    file = folder / LEDGER
    for entry in _entries(file):
        if entry.get("outcome") == "invalid":
            first = _first_difference(entry)
            if (rule := first.partition(": ")[0]) in RULES:
                yield log_scan.rule_clue(rule, first, RULES[rule].fix, file=str(file))
                continue
            refused = [ruleset for ruleset, passed in _verdicts(entry) if passed is False]
            if refused and not first:
                what = f"trial {entry.get('trial')}: MLPerf checker {', '.join(refused)} refused the log"
                yield log_scan.rule_clue("LOG-26", what, None, file=str(file))
                continue
            reasons = {key: entry.get(key) for key in ("trial", "official", "not_as_planned")}
            yield Clue("RUN-12", Weight.OUTCOME, str(file), 1, log_scan.shown(json.dumps(reasons).encode()))


def _entries(ledger: Path) -> list[dict[str, Any]]:
    """Return the entries of a ledger, without damaged ones."""
    entries = atomic_files.read(ledger)
    return (
        [with_current_outcome(entry) for entry in entries if isinstance(entry, dict)]
        if isinstance(entries, list)
        else []
    )


def _verdicts(entry: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the verdicts of the official checker on an entry's log, by ruleset."""
    official = entry.get("official")
    return sorted(official.items()) if isinstance(official, dict) else []


def _first_difference(entry: dict[str, Any]) -> str:
    """Return the first difference between an entry's log and the plan."""
    differing = entry.get("not_as_planned")
    return str(differing[0]) if isinstance(differing, list) and differing else ""


def _scan(report: dict[str, Any], file: str) -> Scan:
    """Return the rule in a report of ours, else the signs in its text."""
    rule, what, fix = report.get("rule"), str(report.get("what", "")), str(report.get("fix", ""))
    if isinstance(rule, str) and rule in RULES:
        return _only(log_scan.rule_clue(rule, what, fix, file=file))
    if _TRACEBACK in what:
        return log_scan.read_text(what, file=file)
    otherwise = "CFG-09" if report.get("exit_code") == 2 else "RUN-10"
    return _only(log_scan.read_message(what, fix, file=file, otherwise=otherwise))


def _only(clue: Clue) -> Scan:
    return Scan((clue,), (), has_records=False)


def _signal(exit_code: Any) -> str:
    with suppress(ValueError, TypeError):
        return signal.Signals(exit_code - 128).name
    return "a signal"
