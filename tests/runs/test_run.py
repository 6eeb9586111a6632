"""Where a run stands, from its folder and what its backend knows."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.backends import Job, JobState
from bench.runs import run as runs


def with_job(folder: Path, monkeypatch: pytest.MonkeyPatch, known: Mapping[str, Job]) -> Path:
    """Write the folder of a run whose last job was 7, and let its backend know the jobs."""
    (folder / "job.json").write_text(json.dumps({"backend": "slurm", "jobs": [{"id": "6"}, {"id": "7"}]}))
    backend = SimpleNamespace(is_here=lambda: True, states=lambda ids: known)
    monkeypatch.setattr(runs.backends, "get", lambda name: backend)
    return folder


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [
        ({"7": JobState.completed}, 0),
        ({"7": JobState.failed}, 1),
        ({"6": JobState.completed}, 1),
        ({}, 1),
        ({"7_0": JobState.completed, "7_1": JobState.completed}, 0),
        ({"7_0": JobState.completed, "7_1": JobState.cancelled}, 1),
    ],
)
def test_without_a_last_word_the_job_itself_says_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: dict[str, JobState], exit_code: int
) -> None:
    known = {id: Job(id=id, state=state, word=state.name.upper()) for id, state in states.items()}
    assert runs.exit_code(with_job(tmp_path, monkeypatch, known)) == exit_code


def test_the_last_word_of_the_run_comes_before_what_its_backend_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_job(tmp_path, monkeypatch, {"7": Job(id="7", state=JobState.completed, word="COMPLETED")})
    (folder / "status.json").write_text('{"outcome": "failed", "exit_code": 143, "what": "cancelled"}')
    assert runs.exit_code(folder) == 143
