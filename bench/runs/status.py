"""The last word of a run, status.json: what it holds, and the one place that writes and reads it.

A batch script that cannot start Python any more writes the same object by itself (`status` in job.sh).
"""

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import masked_json
from bench.contract import atomic_files
from bench.contract.run_files import STATUS


class Ending(StrEnum):
    """How a run ended."""

    proven = "proven"
    not_proven = "not proven"
    failed = "failed"
    interrupted = "interrupted"
    fine = "fine"
    """Of a job that only looked at its nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a run ended, and what to do about it."""

    outcome: Ending
    exit_code: int
    what: str | None = None
    fix: str | None = None
    during: str | None = None
    """What the job was doing when it failed; `while` in the file."""
    rule: str | None = None
    evidence: str | None = None
    file: str | None = None
    """Where the evidence stood when the run ended, and in which line."""
    line: int | None = None


FILE_KEYS = {"during": "while"}


def write(folder: Path, status: Status) -> None:
    """Replace a run's status.json; what is not known is left out."""
    said = {FILE_KEYS.get(f.name, f.name): getattr(status, f.name) for f in fields(Status)}
    masked_json.write(folder / STATUS, {key: value for key, value in said.items() if value is not None})


def read(folder: Path) -> Status | None:
    """Return a run's last word; None while there is none, or none that can be read."""
    raw = atomic_files.read_object(folder / STATUS)
    known: dict[str, Any] = {f.name: raw.get(FILE_KEYS.get(f.name, f.name)) for f in fields(Status)}
    if raw.get("outcome") not in [*Ending] or not isinstance(raw.get("exit_code"), int):
        return None
    known["outcome"] = Ending(raw["outcome"])
    return Status(**known)
