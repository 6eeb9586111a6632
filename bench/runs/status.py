"""Read and write the final status of a run, status.json.

A batch script that cannot start Python writes the same object itself (`status` in job.sh).
"""

import re
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import masked_json
from bench.contract import atomic_files
from bench.contract.run_files import STATUS
from bench.runs.folder import short
from bench.runs.older_outcomes import with_current_outcome


class Ending(StrEnum):
    """How a run ended."""

    valid = "valid"
    invalid = "invalid"
    failed = "failed"
    interrupted = "interrupted"
    passed = "passed"
    """Of a job that only checked its nodes, and found no problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a run ended, and how to fix a failure."""

    outcome: Ending
    exit_code: int
    what: str | None = None
    fix: str | None = None
    during: str | None = None
    """What the job was doing when it failed; `while` in the file."""
    rule: str | None = None
    evidence: str | None = None
    file: str | None = None
    """The file and the line of the evidence when the run ended."""
    line: int | None = None


FILE_KEYS = {"during": "while"}


def write(folder: Path, status: Status) -> None:
    """Replace a run's status.json; fields that are None are left out."""
    content = {FILE_KEYS.get(f.name, f.name): getattr(status, f.name) for f in fields(Status)}
    masked_json.write(folder / STATUS, {key: value for key, value in content.items() if value is not None})


def read(folder: Path) -> Status | None:
    """Return a run's final status; None if it has none yet, or if it cannot be read.

    RUN in a command of the fix is replaced by the folder: it may have been moved since.
    """
    raw = with_current_outcome(atomic_files.read_object(folder / STATUS))
    known: dict[str, Any] = {f.name: raw.get(FILE_KEYS.get(f.name, f.name)) for f in fields(Status)}
    if raw.get("outcome") not in [*Ending] or not isinstance(raw.get("exit_code"), int):
        return None
    known["outcome"] = Ending(raw["outcome"])
    known["fix"] = in_folder(known["fix"], folder)
    return Status(**known)


def in_folder(fix: Any, folder: Path) -> str | None:
    """Return a fix with the folder in place of RUN in its commands; None for a fix that is not a text."""
    return (
        re.sub(r"(\brunstop \w+) RUN\b", lambda match: f"{match[1]} {short(folder)}", fix)
        if isinstance(fix, str)
        else None
    )
