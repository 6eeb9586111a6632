"""What a run of ours says of itself: the accounts of ranks that failed, the launcher's last word, the ledger.

A rank that fails leaves rank_logs/*.error (`jobs.ranks.guard`); the launcher writes status.json and ledger.json (`bench.launch.run_local`).
"""

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.contract.run_files import JOB, LEDGER, RANK_LOGS, STATUS
from bench.diagnosis import log_scan
from bench.diagnosis.log_scan import Clue, Scan
from bench.mlperf.reader import is_number
from bench.rules import RULES
from bench.rules.signs import Weight
from bench.runs import folder as folders

_START_AGAIN = (
    "`python -m bench resume RUN` goes on with it: trials that were finished stay. Ctrl-C sends SIGINT; "
    "`kill`, a logout or a shutdown sends SIGTERM"
)
"""What to do about a run of this machine that somebody stopped."""
_TRACEBACK = "Traceback (most recent call last)"


def status(folder: Path) -> dict[str, Any]:
    """Return what the launcher wrote last; empty while the run goes on, and after the launcher's own death."""
    return folders.read_object(folder / STATUS)


def of_ranks(folder: Path) -> list[Scan]:
    """Return what each rank that failed said, the first one first: the others mostly say that it is gone."""
    found = [
        (said, path) for path in sorted((folder / RANK_LOGS).glob("*.error")) if (said := folders.read_object(path))
    ]
    found.sort(key=lambda pair: pair[0]["time"] if is_number(pair[0].get("time")) else 0)
    return [_scan(said, str(path)) for said, path in found]


def of_launcher(folder: Path) -> list[Scan]:
    """Return what the launcher knows that no log says: who stopped it, or how a rank ended."""
    said, file = status(folder), str(folder / STATUS)
    if said.get("outcome") == "interrupted":
        what = log_scan.shown(str(said.get("what") or f"the launcher got {_signal(said.get('exit_code'))}").encode())
        fix = said.get("fix") or (None if (folder / JOB).exists() else _START_AGAIN)
        # What ranks say of each other's ends follows from this one, unless one of them names a cause.
        return [_only(Clue("SLU-08", Weight.DEATH, file, 1, what, fix))]
    if not isinstance(said.get("what"), str):
        return []
    if "while" in said and not log_scan.names_rule(said["while"]):  # its script knew what failed, and not why
        return _own_explanation(said, file)
    scan = _scan(said, file)
    told = (replace(clue, weight=Weight.OUTCOME) if clue.rule == "RUN-10" else clue for clue in scan.clues)
    return [replace(scan, clues=tuple(told))]


def _own_explanation(said: dict[str, Any], file: str) -> list[Scan]:
    """Return what `explain` found when the job ended: the line that it found, for a run whose logs are gone by now."""
    rule, evidence = said.get("rule"), said.get("evidence")
    if rule not in RULES or not isinstance(evidence, str):
        return []
    return [_only(Clue(rule, Weight.HINT, file, 1, evidence, said.get("fix")))]


def not_proven(folder: Path) -> Iterator[Clue]:
    """Yield the trials that ended well and yet do not prove what was planned."""
    file = folder / LEDGER
    ledger = folders.read(file)
    for entry in ledger if isinstance(ledger, list) else ():
        if isinstance(entry, dict) and entry.get("outcome") == "not proven":
            said = {key: entry.get(key) for key in ("trial", "official", "not_as_planned")}
            yield Clue("RUN-12", Weight.OUTCOME, str(file), 1, log_scan.shown(json.dumps(said).encode()))


def _scan(said: dict[str, Any], file: str) -> Scan:
    what = str(said.get("what", ""))
    if _TRACEBACK in what:
        return log_scan.read_text(what, file=file)
    otherwise = "CFG-09" if said.get("exit_code") == 2 else "RUN-10"
    return _only(log_scan.read_message(what, str(said.get("fix", "")), file=file, otherwise=otherwise))


def _only(clue: Clue) -> Scan:
    return Scan((clue,), (), has_records=False)


def _signal(exit_code: Any) -> str:
    with suppress(ValueError, TypeError):
        return signal.Signals(exit_code - 128).name
    return "a signal"
