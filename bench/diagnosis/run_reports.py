"""What a run of ours reports itself: the accounts of ranks that failed, the launcher's status, the ledger.

A rank that fails leaves rank_logs/*.error (`jobs.ranks.guard`); the launcher writes status.json and ledger.json
(`bench.driver.drive`). These files name the rule in a field of its own.
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

_START_AGAIN = (
    "`python -m bench resume RUN` goes on with it: trials that were finished stay. Ctrl-C sends SIGINT; "
    "`kill`, a logout or a shutdown sends SIGTERM"
)
"""What to do about a run of this machine that somebody stopped."""
_TRACEBACK = "Traceback (most recent call last)"


def status(folder: Path) -> dict[str, Any]:
    """Return what the launcher wrote last; empty while the run goes on, and after the launcher's own death."""
    return atomic_files.read_object(folder / STATUS)


def all_of(folder: Path) -> Iterator[Scan]:
    """Yield all reports, those first that explain the others where they weigh the same."""
    yield from of_ledger(folder)
    yield from of_ranks(folder)
    yield from of_launcher(folder)


def of_ranks(folder: Path) -> list[Scan]:
    """Return the account of each rank that failed, the earliest first: the others mostly report that it is gone."""
    found = [
        (account, path)
        for path in sorted((folder / RANK_LOGS).glob("*.error"))
        if (account := atomic_files.read_object(path))
    ]
    found.sort(key=lambda pair: pair[0]["time"] if is_number(pair[0].get("time")) else 0)
    return [_scan(account, str(path)) for account, path in found]


def of_launcher(folder: Path) -> list[Scan]:
    """Return what the launcher knows and no log says: who stopped it, or how a rank ended."""
    last, file = status(folder), str(folder / STATUS)
    is_batch = (folder / JOB).exists()
    if last.get("outcome") == "interrupted":
        what = log_scan.shown(str(last.get("what") or f"the launcher got {_signal(last.get('exit_code'))}").encode())
        fix = last.get("fix") or (None if is_batch else _START_AGAIN)
        # What ranks say of each other's ends follows from this one, unless one of them names a cause.
        return [_only(Clue("SLU-08", Weight.DEATH, file, 1, what, fix))]
    scans = _own_words(last, file, is_batch=is_batch)
    weighed = [replace(scan, clues=tuple(_weighed(clue, is_batch=is_batch) for clue in scan.clues)) for scan in scans]
    return weighed + _own_explanation(last, file)


def _own_words(last: dict[str, Any], file: str, *, is_batch: bool) -> list[Scan]:
    """Return what the launcher or the batch script has seen itself.

    Where the run was explained when it ended, `what` is the explanation's title, and `while` is what had been seen.
    """
    is_explained = "evidence" in last or "while" in last
    words = last.get("while" if is_explained else "what")
    if not isinstance(words, str):
        return []
    scan = _scan({"what": words} if is_explained else last | {"what": words}, file)
    # A batch script without Python knows what failed (trial 1), and the logs may know why.
    is_vague = (is_batch or is_explained) and all(clue.rule == "RUN-10" for clue in scan.clues)
    return [] if is_vague else [scan]


def _weighed(clue: Clue, *, is_batch: bool) -> Clue:
    """Return a clue of the launcher's. A batch script that ends its run has seen why; here, only that time was up."""
    if clue.rule == "RUN-10":
        return replace(clue, weight=Weight.OUTCOME)
    return replace(clue, weight=Weight.CAUSE) if is_batch and clue.weight is Weight.END else clue


def _own_explanation(last: dict[str, Any], file: str) -> list[Scan]:
    """Return what `explain` found when the job ended: the line that it found, for a run whose logs are gone by now."""
    rule, evidence = last.get("rule"), last.get("evidence")
    if rule not in RULES or not isinstance(evidence, str):
        return []
    place, line = last.get("file"), last.get("line")
    file, line = (place, line) if isinstance(place, str) and isinstance(line, int) else (file, 1)
    return [_only(Clue(rule, Weight.HINT, file, line, evidence, last.get("fix")))]


def of_queue(job: Job | None, file: str) -> list[Scan]:
    """Return what a job's backend says of why the job waits or has failed."""
    if job is None or job.state not in (JobState.queued, JobState.running, JobState.failed):
        return []
    text = log_scan.shown(f"{job.word}: {job.reason}".encode())
    if job.rule in RULES:
        return [_only(Clue(job.rule, Weight.CAUSE, file, 1, text))]
    scan = log_scan.read_text(job.reason, file=file) if job.state is JobState.failed else None
    return [scan] if scan is not None and scan.clues else []


def of_ledger(folder: Path) -> list[Scan]:
    """Return the logs that lay in the folder and were not written by the run."""
    file, found = folder / LEDGER, []
    for entry in _entries(file):
        what = _first_difference(entry)
        if entry.get("outcome") == "aborted" and what.partition(": ")[0] == "LOG-17":
            found.append(_only(log_scan.read_message(what, RULES["LOG-17"].fix, file=str(file))))
    return found


def not_proven(folder: Path) -> Iterator[Clue]:
    """Yield the trials that ended well and yet do not prove what was planned."""
    file = folder / LEDGER
    for entry in _entries(file):
        if entry.get("outcome") == "not proven":
            first = _first_difference(entry)
            if (rule := first.partition(": ")[0]) in RULES:
                yield log_scan.of_rule(rule, first, RULES[rule].fix, file=str(file))
                continue
            reasons = {key: entry.get(key) for key in ("trial", "official", "not_as_planned")}
            yield Clue("RUN-12", Weight.OUTCOME, str(file), 1, log_scan.shown(json.dumps(reasons).encode()))


def _entries(ledger: Path) -> list[dict[str, Any]]:
    """Return the entries of a ledger; what is damaged is left out."""
    found = atomic_files.read(ledger)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def _first_difference(entry: dict[str, Any]) -> str:
    """Return what an entry says first of how its log differs from the plan."""
    differing = entry.get("not_as_planned")
    return str(differing[0]) if isinstance(differing, list) and differing else ""


def _scan(account: dict[str, Any], file: str) -> Scan:
    """Return the rule that an account of ours names; the signs in its text where it names none."""
    rule, what, fix = account.get("rule"), str(account.get("what", "")), str(account.get("fix", ""))
    if isinstance(rule, str) and rule in RULES:
        return _only(log_scan.of_rule(rule, what, fix, file=file))
    if _TRACEBACK in what:
        return log_scan.read_text(what, file=file)
    otherwise = "CFG-09" if account.get("exit_code") == 2 else "RUN-10"
    return _only(log_scan.read_message(what, fix, file=file, otherwise=otherwise))


def _only(clue: Clue) -> Scan:
    return Scan((clue,), (), has_records=False)


def _signal(exit_code: Any) -> str:
    with suppress(ValueError, TypeError):
        return signal.Signals(exit_code - 128).name
    return "a signal"
