"""The name of a run's state: of its job while that is active, then its outcome, else why nothing is known."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.backends.protocol import Job, JobState
from bench.contract.schema import BackendName
from bench.runs.run import Run
from bench.runs.status import Ending, Status

DONE = Status(outcome=Ending.valid, exit_code=0)


def jobs(*states: str) -> tuple[Job, ...]:
    return tuple(Job(id=f"7_{n}", state=JobState[state], native_state=state.upper()) for n, state in enumerate(states))


DIED = ("unknown to slurm", "no job", "FAILED", "CANCELLED", "COMPLETED")
"""Ends without a status."""


@pytest.mark.parametrize(
    ("changes", "name", "is_active"),
    [
        ({}, "unknown to slurm", False),
        ({"jobs": ()}, "no job", False),
        ({"is_queried": False}, "unknown: slurm cannot be queried here", False),
        ({"is_queried": False, "unknown_backend": "pbs"}, "unknown: pbs cannot be queried here", False),
        (
            {"is_queried": False, "why_not_queried": "user a owns this folder"},
            "unknown: slurm is not queried, because user a owns this folder",
            False,
        ),
        ({"state": jobs("running")[0]}, "RUNNING", True),
        ({"state": jobs("running")[0], "status": DONE}, "RUNNING", True),
        ({"state": jobs("failed")[0], "status": DONE}, "valid", False),
        ({"state": jobs("failed")[0]}, "FAILED", False),
        ({"elements": jobs("completed", "running", "queued", "running")}, "1 COMPLETED, 2 RUNNING, 1 QUEUED", True),
        ({"elements": jobs("completed", "cancelled", "failed")}, "CANCELLED", False),
        ({"elements": jobs("completed", "completed")}, "COMPLETED", False),
        ({"status": replace(DONE, outcome=Ending.interrupted)}, "interrupted", False),
    ],
)
def test_the_state_of_a_run_has_a_name(changes: dict[str, Any], name: str, is_active: bool, tmp_path: Path) -> None:
    usual = {"backend": BackendName.slurm, "jobs": ("6", "7"), "state": None, "elements": (), "outcomes": ()}
    run = Run(**{"folder": tmp_path, "status": None, **usual, **changes})
    assert (run.state_name, run.is_active) == (name, is_active)
    assert run.id == ("7" if run.jobs else str(tmp_path)) and not run.has_died
    (tmp_path / ".reserve").touch()
    assert run.has_died == (name in DIED)
